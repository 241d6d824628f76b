"""`ShownFigure`: a figure that a notebook shows."""

from __future__ import annotations

from matplotlib.figure import Figure

from hpcfed.io.figure import rendered


class ShownFigure(Figure):
    """A figure that a notebook shows, also one that has not imported pyplot, which makes IPython show any figure."""

    def _repr_png_(self) -> bytes:
        return rendered(self, "png", dpi=100)
