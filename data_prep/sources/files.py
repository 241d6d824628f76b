"""The raw files of a data set: the published ones, the user's, and whether they agree."""

from __future__ import annotations

import errno
import hashlib
import inspect
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from data_prep.dataset import Dataset
from hpcfed.errors import EnvironmentFailure, InputError, first_of

AGAIN = "copy or download it again"
CLUTTER = ("__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "__pycache__", "$recycle.bin", "icon\r")
"""Names, in lower case, of files and folders that systems leave among others; `._x.png` of macOS is hidden, too."""
LISTED = "`hpcfed prepare --list` says where it comes from"
CHUNK = 1 << 20
MACHINE = {
    errno.EIO,
    errno.ENXIO,
    errno.ENODEV,
    errno.ENOMEM,
    errno.ENOSPC,
    errno.EMFILE,
    errno.ENFILE,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EREMOTEIO,
}
"""Error numbers that mean a fault of the machine, not of the user."""


@dataclass(frozen=True)
class Published:
    """One published file, or a file of a published archive.

    Attributes:
        name: in the user's folder.
        size: bytes; None if unknown.
        md5, sha256: "" if not published.
        unpack: how to unpack it before it can be read; "" if it is read as it is.
    """

    name: str
    size: int | None = None
    md5: str = ""
    sha256: str = ""
    unpack: str = ""

    def facts(self) -> str:
        """Return size and checksum as text."""
        size = f"{self.size:,} bytes" if self.size is not None else ""
        digests = (f"{kind} {value}" for kind, value in (("md5", self.md5), ("sha256", self.sha256)) if value)
        return ", ".join(part for part in (size, *digests) if part) or "no size or checksum is published"


@dataclass(frozen=True)
class Origin:
    """Where the files of a data set come from.

    Attributes:
        title: the data set in one line.
        url: the publisher's page.
        files: every file that is published or read.
        layout: required contents of the folder ``--raw``.
    """

    title: str
    url: str = ""
    files: tuple[Published, ...] = ()
    layout: str = ""


@dataclass(frozen=True)
class DataSource:
    """A data set by the name that a user types.

    Attributes:
        load: reader or generator. Its parameters are among `raw`, the folder of the source's files; `seed`; and
            keyword-only options.
        origin: title, and the published files.
        seed: default seed.
    """

    load: Callable[..., Dataset]
    origin: Origin
    seed: int = 0

    @property
    def options(self) -> list[str]:
        """The names of `load`'s options."""
        parameters = inspect.signature(self.load).parameters.values()
        return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]

    def takes(self, what: str) -> bool:
        """Tell whether `load` has a parameter of that name."""
        return what in inspect.signature(self.load).parameters


def locate(folder: Path, wanted: Mapping[str, Sequence[str]], *, inside: str = "") -> dict[str, Path]:
    """Return key → path for the first of each key's names that is a file in `folder`, or in its subfolder `inside`.

    Raises:
        InputError: the folder is missing, or files are; every missing file is named.
    """
    check_folder(folder)
    places = [folder / inside, folder] if inside else [folder]
    found, missing = {}, []
    for key, names in wanted.items():
        path = next((place / name for place in places for name in names if (place / name).is_file()), None)
        if path is None:
            missing.append(spelled(names))
        else:
            found[key] = path
    if missing:
        remedy = f"put {'it' if len(missing) == 1 else 'them'} into that folder; {LISTED}"
        raise InputError(f"missing {', '.join(missing)}", where=str(folder), remedy=remedy)
    return found


def is_clutter(name: str) -> bool:
    """Whether a file or folder of this name is none of the user's, but one that a system or a program leaves."""
    return name.startswith((".", "~$")) or name.lower() in CLUTTER


def listed(folder: Path, pattern: str) -> list[Path]:
    """Return the user's files in a folder that match a pattern, in order.

    Raises:
        InputError: one is a pipe or a device.
    """
    found = sorted(path for path in folder.glob(pattern) if not is_clutter(path.name))
    refuse_special(found)
    return found


def refuse_special(paths: Iterable[Path]) -> None:
    """Refuse a pipe, which would be waited for, and a device, which may have no end, among raw files.

    Raises:
        InputError: there is one.
    """
    for path in paths:
        with suppress(OSError):  # it has gone, or is a broken link: said where it is read
            mode = path.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise InputError("a pipe, a socket or a device, not a file", where=str(path), remedy="remove it")


def check_folder(folder: Path) -> None:
    """Refuse a path that is not a folder.

    Raises:
        InputError: it is missing, or a file.
    """
    if not folder.is_dir():
        raise InputError("no such folder", where=str(folder), remedy="name the one with the raw files by --raw")


def spelled(names: Sequence[str]) -> str:
    """Return a file's possible names in short: the first, with ``[.gz]`` if it may also be packed."""
    return names[0] + ("[.gz]" if f"{names[0]}.gz" in names else "")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of the file system into errors of one line.

    Raises:
        InputError: the file can't be read.
        EnvironmentFailure: the machine fails to read it.
    """
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> InputError | EnvironmentFailure:
    """Return the error for a file that the user may not, or the machine cannot, read."""
    got = (error.strerror or str(error))[:80]
    where = str(path if error.filename is None else error.filename)
    if error.errno in MACHINE:
        return EnvironmentFailure(
            "reading failed", where=where, got=got, remedy="try again, or ask the machine's administrator"
        )
    if error.errno == errno.ENOENT and Path(where).is_symlink():
        return InputError("a link to a file that is not there", where=where, remedy="mend or remove it")
    remedies = {errno.ENOENT: "check the path", **dict.fromkeys((errno.EACCES, errno.EPERM), "check its permissions")}
    remedy = remedies.get(error.errno or 0, "")
    return InputError("can't be read", where=where, got=got, remedy=remedy)


def damaged(path: Path, what: str, error: Exception | None = None) -> InputError:
    """Return the error for a damaged file, or one of another format."""
    return InputError(what, where=str(path), got="" if error is None else str(error), remedy=AGAIN)


def examine(
    origin: Origin, paths: Iterable[Path], *, title: str, published: Callable[[str], str] = str
) -> tuple[list[dict[str, str]], str]:
    """Return the provenance of the files that were read, and a line on whether they are the published ones.

    Args:
        origin: the published files.
        paths: the files that were read.
        title: the data set's name in the line.
        published: maps a file's name on disk to its published name.
    """
    known = {file.name: file for file in origin.files}
    entries, others, unknown = [], [], []
    for path in paths:
        with reading(path):
            md5, sha256 = digests(path)
            size = path.stat().st_size
        entries.append({"name": path.name, "sha256": sha256})
        file = known.get(published(path.name))
        if file is None or not (file.md5 or file.sha256 or file.size):
            unknown.append(path.name)
        elif file.md5 not in ("", md5) or file.sha256 not in ("", sha256) or file.size not in (None, size):
            others.append(path.name)
        elif not (file.md5 or file.sha256):
            unknown.append(path.name)
    if others:
        return entries, f"md5: not the published files of {title}: {', '.join(others)}"
    if unknown:
        return entries, f"md5: none is published for {first_of(unknown, 6)}; sha256 goes into the federation file"
    count = "the file is" if len(entries) == 1 else f"all {len(entries)} files are"
    return entries, f"md5: {count} the published {title}"


def digests(path: Path) -> tuple[str, str]:
    """Return md5 and sha256 of a file as stored, without unpacking it."""
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            md5.update(piece)
            sha256.update(piece)
    return md5.hexdigest(), sha256.hexdigest()
