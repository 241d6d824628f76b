"""Reports: figures, tables and one self-contained HTML page from run folders, finished or still running."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcfed.lab.report.comparison import Comparison, compare, make_report, write_comparison

__all__ = ["Comparison", "compare", "make_report", "write_comparison"]


def __getattr__(name: str) -> Any:
    """Import the drawing modules on first use: other packages only read run folders and need no matplotlib."""
    if name in __all__:
        from hpcfed.lab.report import comparison

        return getattr(comparison, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
