"""Figures as bytes of a file."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def rendered(figure: Figure, kind: str, **options: Any) -> bytes:
    """Return a figure as ``png``, ``pdf`` or ``svg``, with matplotlib's `options` of that type.

    Characters that no font of matplotlib's has are boxes there, unless an SVG keeps text as text. Its warnings, several
    for each such character of a site's name, are left out.
    """
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(buffer, format=kind, **options)
    return buffer.getvalue()
