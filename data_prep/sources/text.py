"""Text as next-token samples: 80 characters and the one that follows, at every position of a client's text.

`load` reads plain text by role: paragraphs that each begin with a line ``ROLE:``; every role is a client. The speeches
of a role are joined by newlines. The first 80 % of a role's samples are for training, the rest for testing, less the 80
in between, so that no character of a test sample is in a training sample. Roles too short for one sample are left out.
The text is held in memory; the samples, eighty times as large, are not.

References: McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017,
section 3; Caldas et al., "LEAF", arXiv 1812.01097; the 80 characters of models/utils/language_utils.py of its code.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources.files import LISTED, DataSource, Origin, Published, check_folder, examine, listed, reading
from data_prep.spool import Spool
from hpcfed.errors import InputError

WINDOW = 80
TRAIN_FRACTION = 0.8
MOST_STRANGE = 0.01
"""Largest share of characters outside the alphabet; a text with more does not fit the alphabet."""
LEAF_LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
ORIGIN = Origin(
    "Shakespeare by role, from plain text: paragraphs that begin with a line 'ROLE:'",
    "https://github.com/karpathy/char-rnn/tree/master/data/tinyshakespeare",
    (Published("tinyshakespeare.txt", 1_115_394),),
    "one text file; --raw may name it",
)


class Alphabet:
    """Numbering of characters; unknown characters are read as spaces, and counted.

    Attributes:
        letters: the characters, in the order of their numbers.
        num_read, num_strange: characters encoded so far, and the unknown ones among them.
    """

    def __init__(self, letters: str):
        self.letters = letters
        self.num_read = self.num_strange = 0
        self._codes = np.full(0x110000, len(letters), np.uint8)
        self._codes[[ord(letter) for letter in letters]] = np.arange(len(letters))

    def encode(self, text: str) -> np.ndarray:
        """Return the numbers of the characters, (len(text),) uint8."""
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        codes = self._codes[points]
        strange = codes == len(self.letters)
        codes[strange] = self.letters.index(" ")
        self.num_read += len(codes)
        self.num_strange += int(strange.sum())
        return codes

    def verdict(self, where: str) -> tuple[str, ...]:
        """Return a remark on unknown characters, if there were any.

        Raises:
            InputError: there were too many of them.
        """
        if self.num_strange > MOST_STRANGE * self.num_read:
            expected = f"at most {MOST_STRANGE:.0%} of characters outside the {len(self.letters)} known ones"
            raise InputError("another alphabet", where=where, expected=expected, got=f"{self.num_strange:,}")
        if not self.num_strange:
            return ()
        return (f"text: {self.num_strange:,} characters outside the {len(self.letters)} known ones, read as spaces",)


class TextSamples:
    """Samples of many clients, concatenated on disk."""

    def __init__(self) -> None:
        self._x, self._y = Spool((WINDOW,), np.uint8), Spool((), np.uint8)
        self._owner: list[np.ndarray] = []

    def append(self, client: int, x: np.ndarray, y: np.ndarray) -> None:
        """Add samples x (m, 80) and y (m,) of a client."""
        self._x.append(x)
        self._y.append(y)
        self._owner.append(np.full(len(y), client))

    def finish(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return x (n, 80) and y (n,), both uint8, and owner (n,) int64."""
        return self._x.finish(), self._y.finish(), np.concatenate([np.empty(0, np.int64), *self._owner])


def windows(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all samples of a text (c,), as views: x (c - 80, 80) and y (c - 80,); none of a shorter text."""
    if len(codes) <= WINDOW:
        return np.empty((0, WINDOW), np.uint8), np.empty(0, np.uint8)
    return np.lib.stride_tricks.sliding_window_view(codes, WINDOW)[:-1], codes[WINDOW:]


def load(raw: str | Path) -> Dataset:
    """Read a text by role: x (n, 80) uint8, y (n,) uint8, split by role, each with test samples of its own.

    Raises:
        InputError: no such file, several of them, not UTF-8, or no roles in it.
    """
    path = _text_file(Path(raw))
    alphabet, train, test = Alphabet(LEAF_LETTERS), TextSamples(), TextSamples()
    roles: list[str] = []
    with reading(path):
        try:
            with path.open(encoding="utf-8") as file:
                texts = by_role(file, str(path))
        except UnicodeDecodeError as error:
            raise InputError("not a text in UTF-8", where=str(path), got=str(error)) from error
    for role, text in texts.items():
        x, y = windows(alphabet.encode(text))
        num_train = int(TRAIN_FRACTION * len(y))
        if not num_train:
            continue
        train.append(len(roles), x[:num_train], y[:num_train])
        test.append(len(roles), x[num_train + WINDOW :], y[num_train + WINDOW :])
        roles.append(role)
    if not roles:
        raise InputError(f"no role speaks more than {WINDOW} characters", where=str(path))
    (x, y, owner), (test_x, test_y, test_owner) = train.finish(), test.finish()
    files, verdict = examine(ORIGIN, [path], title="Shakespeare")
    short = len(texts) - len(roles)
    return Dataset(
        name="shakespeare",
        task="next-token",
        x=x,
        y=y,
        num_classes=len(LEAF_LETTERS),
        test_x=test_x if len(test_y) else None,
        test_y=test_y if len(test_y) else None,
        source={"files": files, "window": WINDOW, "train_fraction": TRAIN_FRACTION},
        owner=owner,
        test_owner=test_owner if len(test_y) else None,
        clients=tuple(roles),
        vocabulary=LEAF_LETTERS,
        remarks=(verdict, *alphabet.verdict(str(path)), f"roles: {len(roles):,}, and {short:,} too short to use"),
    )


def by_role(lines: Iterable[str], where: str) -> dict[str, str]:
    """Return role → all its speeches, with roles in the order of their first speech.

    A paragraph belongs to the previous role unless its first line is a name and a colon.

    Raises:
        InputError: the text does not begin with a role.
    """
    speeches: dict[str, list[str]] = {}
    role, first = None, True
    for line in lines:
        line = line.rstrip("\n")
        if not line.strip():
            first = True
            continue
        if first and line.endswith(":"):
            role = line[:-1]
            speeches.setdefault(role, [])
        elif role is None:
            raise InputError("no role speaks the first line", where=where, expected="'ROLE:'", got=repr(line[:40]))
        else:
            speeches[role].append(line)
        first = False
    return {role: "\n".join(said) for role, said in speeches.items()}


def _text_file(raw: Path) -> Path:
    if raw.is_file():
        return raw
    check_folder(raw)
    found = listed(raw, "*.txt")
    if len(found) != 1:
        got = ", ".join(path.name for path in found[:6]) or "none"
        raise InputError("not one text file", where=str(raw), got=got, remedy=f"name it by --raw; {LISTED}")
    return found[0]


SOURCES = {"shakespeare": DataSource(load, ORIGIN)}
