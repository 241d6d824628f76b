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
