"""Pictures that are not drawn, for tests of the numbers and words beside them: drawing takes most of a page's time."""

from __future__ import annotations

import pytest

BLANK = {"svg": b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"/>', "png": b"", "pdf": b""}


@pytest.fixture
def blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are set up as always, and left blank when they are to be rendered."""
    monkeypatch.setattr("hpcfed.io.figure._saved", lambda figure, kind, options: (BLANK[kind], set()))
