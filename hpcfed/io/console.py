"""Tables and bars on a terminal: rich's console over an `Output`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

import rich.console
from rich.segment import Segment

from hpcfed.errors import visible
from hpcfed.io.output import Output


class Console(rich.console.Console):
    """A console whose escapes are its own: those within the texts that it shows are made visible.

    Args:
        file: standard output unless given.
        options: rich's.
    """

    def __init__(self, *, file: TextIO | Output | None = None, **options: Any):
        super().__init__(file=Output(file or sys.stdout, cleans=False), **options)  # type: ignore[arg-type]

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        """Yield the segments of what is shown; see rich."""
        for segment in super().render(*arguments, **options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
