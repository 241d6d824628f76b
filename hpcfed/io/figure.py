"""Figures as bytes of a file."""

from __future__ import annotations

import io
import re
import warnings
from typing import TYPE_CHECKING, Any

from hpcfed.errors import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISSING = re.compile(r"Glyph (\d+) ")
"""matplotlib's warning of a character that none of a text's fonts has."""
_SAID: set[str] = set()
"""Characters that a line has named already."""


def literal(text: str) -> str:
    """Return a text as matplotlib draws it letter by letter: a `$` would begin mathematics.

    Control characters are escaped: SVG cannot hold them.
    """
    return visible(text).replace("$", r"\$")


def rendered(figure: Figure, kind: str, **options: Any) -> bytes:
    """Return a figure as ``png``, ``pdf`` or ``svg``, with matplotlib's `options` of that type.

    Characters that matplotlib's own font lacks (Chinese, Japanese, Korean, …) are drawn with fonts of the system that
    have them. Those that no font has are boxes, which a line says once; an SVG that keeps text as text needs no font.
    """
    content, missing = _saved(figure, kind, options)
    if missing and (families := _fonts_with(missing)):
        from matplotlib.text import Text

        for text in figure.findobj(Text):
            text.set_fontfamily([*text.get_fontfamily(), *families])
        content, missing = _saved(figure, kind, options)
    if kind != "svg" and not missing <= _SAID:
        _SAID.update(missing)
        shown = "".join(sorted(missing))[:20]
        warnings.warn(
            f"pictures: no font here has {shown}: boxes in their place; install one (fonts-noto-cjk, …)", stacklevel=1
        )
    return content


def _saved(figure: Figure, kind: str, options: dict[str, Any]) -> tuple[bytes, set[str]]:
    """Return the figure's bytes, and the characters that none of its fonts has."""
    buffer = io.BytesIO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", MISSING.pattern, UserWarning)
        figure.savefig(buffer, format=kind, **options)
    missing: set[str] = set()
    for warning in caught:
        if found := MISSING.match(str(warning.message)):
            missing.add(chr(int(found[1])))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return buffer.getvalue(), missing


def _fonts_with(characters: set[str]) -> list[str]:
    """Return font families of the system that have `characters`, as far as any has, those with the most first."""
    from matplotlib import font_manager

    wanted = {ord(character) for character in characters}
    coverage: dict[str, set[int]] = {}
    for path in sorted(font_manager.findSystemFonts()):
        try:
            font = font_manager.get_font(path)
            coverage[path] = wanted & font.get_charmap().keys() if font.style_name == "Regular" else set()
        except (OSError, RuntimeError, ValueError):  # a font that FreeType cannot read, such as one of coloured bitmaps
            continue
    families = []
    while coverage and (best := max(coverage, key=lambda path: (len(coverage[path] & wanted), "Sans" in path))):
        if not coverage[best] & wanted:
            break
        font_manager.fontManager.addfont(best)  # which its cached list may lack
        families.append(font_manager.get_font(best).family_name)
        wanted -= coverage.pop(best)
    return families
