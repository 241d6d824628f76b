"""Names, tables and bars on a terminal: rich's console over an `Output`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

import rich.console
from rich.segment import Segment

from hpcfed.errors import visible
from hpcfed.io.output import Output

PIPED_WIDTH = 120
"""Columns of a table in a file, whatever ``COLUMNS`` says."""
MAX_NAME = 24
"""Characters shown of a name."""


def short_names(names: Sequence[str]) -> list[str]:
    """Return names of at most `MAX_NAME` characters: longer ones lose their middle, and stay different.

    Those that would be alike, or like a shorter name, end in their number in the list.
    """
    half = MAX_NAME // 2
    cut = [name if len(name) <= MAX_NAME else f"{name[: half - 1]}…{name[-half:]}" for name in names]
    counts = Counter(cut)
    return [
        f"{name[: MAX_NAME - 2 - len(str(number))]}… {number}" if short != name and counts[short] > 1 else short
        for number, (name, short) in enumerate(zip(names, cut, strict=True))
    ]


class Console(rich.console.Console):
    """A rich console that makes control characters in the texts it prints visible.

    Args:
        file: default: standard output.
        options: rich's.
    """

    def __init__(self, *, file: TextIO | Output | None = None, **options: Any):
        super().__init__(file=Output(file or sys.stdout, cleans=False), **options)  # type: ignore[arg-type]

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        """Yield rich's segments, their texts made visible."""
        for segment in super().render(*arguments, **options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
