"""The catalogue of data sets by name: the `SOURCES` of the files in ``sources`` and ``synthetic``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from data_prep.sources.files import DataSource
from hpcfed.config import registry

SOURCES: dict[str, DataSource] = {
    **registry.tables("data_prep.sources", "SOURCES"),
    **registry.tables("data_prep.synthetic", "SOURCES"),
}


def listing() -> Iterator[str]:
    """Yield the lines of ``hpcfed prepare --list``: each source's files, with sizes and checksums."""
    for name, source in SOURCES.items():
        origin = source.origin
        yield f"{name:<18} {origin.title}"
        indented = partial("{:<18} {}".format, "")
        if origin.url:
            yield indented(f"from {origin.url}")
        if origin.layout:
            yield indented(f"--raw: {origin.layout}")
        for file in origin.files:
            yield indented(f"  {file.name}: {file.facts()}{f'; {file.unpack}' if file.unpack else ''}")
        yield ""
    yield "Nothing is downloaded: put the files into a folder yourself, and name it by --raw."
