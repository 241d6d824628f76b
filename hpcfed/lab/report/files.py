"""Tables as files: CSV as shown, and LaTeX for a paper."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from hpcfed.errors import visible
from hpcfed.lab.report.tables import Table

ESCAPED = {sign: f"\\{sign}" for sign in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "±": r"$\pm$", "−": "$-$", "–": "--", "·": r"$\cdot$", "\u00a0": "~", "…": r"\dots{}", "×": r"$\times$",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''",
}  # fmt: skip
"""Character of a table's text → its LaTeX; \\textquotedbl would need another font encoding."""
BREAK = re.compile(r"[\r\n]+")
"""Ends of lines, as a name may have: LaTeX would read what follows one in a comment."""
LONG = 32
"""Maximum length in characters of a cell without line breaks."""


def csv_of_table(table: Table) -> str:
    """Return a table as CSV, with the cells as they are shown."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.header, *table.rows])
    return text.getvalue()


def latex_of_table(table: Table) -> str:
    """Return a table as a LaTeX tabular with booktabs' rules; title and note are LaTeX comments, strong cells bold."""
    lines = [f"% {_in_a_line(line)}" for line in (table.title, table.note) if line]
    lines += [r"\begin{tabular}{l" + "r" * (len(table.header) - 1) + "}", r"\toprule"]
    lines += [_line([_escaped(cell) for cell in table.header]), r"\midrule"]
    for number, row in enumerate(table.rows):
        cells = [_escaped(cell) for cell in row]
        bold = [
            rf"\textbf{{{cell}}}" if (number, column) in table.strong else cell for column, cell in enumerate(cells)
        ]
        lines.append(_line(bold))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def file_name(title: str) -> str:
    """Return a table's title as a file name without suffix."""
    return re.sub(r"[^\w.]+", "-", title.lower()).strip("-")


def _in_a_line(text: str) -> str:
    return visible(BREAK.sub(" ", text))


def _line(cells: Sequence[str]) -> str:
    """Return a row; ``{}`` before a first cell that the rule or the row above would read as its option."""
    return ("{}" if cells[0].startswith(("[", "*")) else "") + " & ".join(cells) + r" \\"


def _escaped(text: str) -> str:
    """Return a cell's text escaped for LaTeX; if longer than `LONG`, it may break into lines, also after ``_-./,:``."""
    text = _in_a_line(text)
    if len(text) <= LONG:
        return "".join(ESCAPED.get(sign, sign) for sign in text)
    words = "".join(ESCAPED.get(sign, sign) + r"\allowbreak{}" * (sign in "_-./,:") for sign in text)
    return rf"\parbox[t]{{4cm}}{{\raggedright\hspace{{0pt}}{words}}}"
