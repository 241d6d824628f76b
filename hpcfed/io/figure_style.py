"""The look of figures, in files and on the page, drawn without a display or global state.

Each group keeps its colour (after Okabe and Ito's palette for colour-blind readers) and its dash in all figures, so
lines stay apart where they coincide, and in grey. For the page a figure is drawn once, its colours replaced by the
page's variables, so that it follows the reader's light or dark scheme.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.figure import Figure

from hpcfed.io.figure import rendered

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

DPI = 160
DASHES: tuple[Any, ...] = ("-", (0, (6, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (1.5, 1.2)))


SPARSE = 25
"""Most points of a curve that is drawn with a marker at each."""


@dataclass(frozen=True)
class Theme:
    """Colours of the background, text, helper lines (grid, axes), groups in turn, and phases of a round."""

    background: str
    text: str
    helper: str
    groups: tuple[str, ...]
    phases: tuple[str, ...]

    def variables(self) -> dict[str, str]:
        """Return the page's variables, name → colour: ``text``, ``groups-0``, ``groups-1``, …"""
        named: dict[str, str] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            entries = {field.name: value} if isinstance(value, str) else _numbered(field.name, value)
            named |= entries
        return named


def _numbered(name: str, colours: tuple[str, ...]) -> dict[str, str]:
    return {f"{name}-{number}": colour for number, colour in enumerate(colours)}


LIGHT = Theme(
    "#ffffff",
    "#1c1e21",
    "#d5d8dc",
    ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#3a9bd1", "#555555"),
    ("#4c6a92", "#c8553d", "#e0a458", "#8a9a5b", "#9aa5b1"),
)
DARK = Theme(
    "#16181d",
    "#e6e8ec",
    "#353a43",
    ("#56b4e9", "#ff8a4c", "#2cc69b", "#e29bc4", "#f0c244", "#a9b8ff", "#b5b5b5"),
    ("#7e9cc7", "#e57a62", "#ecbf82", "#adbd7e", "#6d7885"),
)


@dataclass(frozen=True)
class Medium:
    """Where a figure is shown: its size in inches, its font size in points, and whether it has its own legend."""

    width: float
    height: float
    font: float
    legend: bool


PAPER = Medium(6.4, 4.1, 10.5, legend=True)
PAGE = Medium(4.6, 2.9, 9.6, legend=False)


def markers(num_points: int) -> dict[str, Any]:
    """Return the keywords for the markers of a curve, which show where a sparse one was measured; dense ones have none.

    A curve of a single point is only its marker.
    """
    return {"marker": "o", "markersize": 4} if num_points <= SPARSE else {}


def over(index: int) -> float:
    """Return the zorder of line `index`: solid lines lie below, so that they show through the gaps of dashed ones."""
    return 3 + 0.1 * (index % len(DASHES))


def blank(medium: Medium, height: float | None = None) -> tuple[Figure, Axes]:
    """Return a figure of the light theme with empty axes; `height` in inches, the medium's by default."""
    figure, ((axes,),) = panels(medium, 1, 1, height)
    return figure, axes


def panels(medium: Medium, rows: int, columns: int, height: float | None = None) -> tuple[Figure, np.ndarray]:
    """Return a figure of the light theme with `rows` × `columns` empty axes."""
    style: dict[Any, Any] = {
        "figure.facecolor": LIGHT.background,
        "axes.facecolor": LIGHT.background,
        "axes.edgecolor": LIGHT.text,
        "axes.labelcolor": LIGHT.text,
        "xtick.color": LIGHT.text,
        "ytick.color": LIGHT.text,
        "text.color": LIGHT.text,
        "grid.color": LIGHT.helper,
        "font.size": medium.font,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.8,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.linewidth": 0.6,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(medium.width, height or medium.height), layout="constrained")
        return figure, figure.subplots(rows, columns, squeeze=False)


def to_files(figure: Figure) -> dict[str, bytes]:
    """Return the figure as ``.png`` and ``.pdf``; equal figures give equal bytes."""
    found = {}
    for suffix, metadata in ((".png", {"Software": "hpcfed report"}), (".pdf", {"CreationDate": None})):
        with mpl.rc_context({"pdf.fonttype": 42}):
            found[suffix] = rendered(figure, suffix[1:], dpi=DPI, metadata=metadata)
        figure.set_layout_engine("none")  # the second file keeps the layout of the first
    return found


def to_svg(figure: Figure, name: str) -> str:
    """Return the figure as an ``svg`` element for the page: text stays text, colours become the page's variables.

    Its identifiers begin with `name`, so that they are unique on a page; those of methods become ``data-method``.
    """
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        written = rendered(figure, "svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = ElementTree.fromstring(written)
    for parent in list(drawn.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):  # a style would apply to the whole page
                parent.remove(child)
    for element in drawn.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: _of_page(key, text, name) for key, text in element.attrib.items()}
        if found := _METHOD.fullmatch(element.get("id", "").removeprefix(f"{name}-")):
            del element.attrib["id"]
            element.attrib |= {"data-method": found[1], "data-part": found[2]}
    drawn.attrib = {"viewBox": drawn.attrib["viewBox"], "aria-hidden": "true"}
    return ElementTree.tostring(drawn, encoding="unicode")


def _of_page(key: str, text: str, name: str) -> str:
    """Return an attribute's text with unique identifiers and the page's colours and font."""
    if key == "id":
        return f"{name}-{text}"
    if key.endswith("href") or key == "clip-path":
        return text.replace("#", f"#{name}-")
    if key != "style":
        return text
    kept = "; ".join(part for part in text.split("; ") if not part.startswith("font-family"))
    return re.sub(r"#[0-9a-f]{6}", lambda colour: _VARIABLES.get(colour[0], colour[0]), kept)


_METHOD = re.compile(r"method-(\d+)-(\w+)")
"""Group identifiers of what is drawn of a method, several of which a figure may have (`hpcfed.lab.report.curves`)."""
_VARIABLES = {colour: f"var(--{variable})" for variable, colour in LIGHT.variables().items()}
