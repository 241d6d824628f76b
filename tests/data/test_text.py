"""Text by role: 80 characters predict the next; training and test parts do not overlap; other files are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep.sources import text
from hpcfed.errors import InputError
from tests.shared_files import shared_folder

PLAY = """First Citizen:
Before we proceed any further, hear me speak. Let us kill him, and we'll have corn at our own price.

All:
Speak, speak.

First Citizen:
You are all resolved rather to die
than to famish?

We'll revenge this with our pikes, ere we become rakes: for the gods know
I speak this in hunger for bread, not in thirst for revenge.
"""
SAID = (
    "Before we proceed any further, hear me speak. Let us kill him, and we'll have corn at our own price.\n"
    "You are all resolved rather to die\nthan to famish?\n"
    "We'll revenge this with our pikes, ere we become rakes: for the gods know\n"
    "I speak this in hunger for bread, not in thirst for revenge."
)


def decoded(codes: np.ndarray) -> str:
    return "".join(text.LEAF_LETTERS[code] for code in codes)


def test_roles_windows_and_halves(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text(PLAY)
    for raw in (tmp_path, tmp_path / "play.txt"):
        dataset = text.load(raw)
    assert (dataset.clients, dataset.num_classes, dataset.task) == (("First Citizen",), 80, "next-token")
    samples = [(SAID[i : i + 80], SAID[i + 80]) for i in range(len(SAID) - 80)]
    num_train = int(0.8 * len(samples))
    read = list(zip(map(decoded, dataset.x), decoded(dataset.y), strict=True))
    assert read == samples[:num_train]
    tested = (
        list(zip(map(decoded, dataset.test_x), decoded(dataset.test_y), strict=True))
        if dataset.test_x is not None
        else []
    )
    assert tested == samples[num_train + 80 :]
    assert dataset.remarks[-1] == "roles: 1, and 1 too short to use"


def test_no_character_of_a_test_sample_was_in_a_training_one(tmp_path: Path) -> None:
    """Every character has a number of its own place modulo 79, so that overlapping places would show."""
    places = np.arange(2000)
    (tmp_path / "a.txt").write_text("A:\n" + "".join(text.LEAF_LETTERS[1 + place % 79] for place in places))
    dataset = text.load(tmp_path)
    num_train, num_test = len(dataset.y), len(dataset.test_y)
    assert num_train == int(0.8 * 1920)
    assert num_train + 80 + num_test == 1920
    assert (dataset.test_x[0, 0] - 1) % 79 == (num_train + 80) % 79


def test_strange_characters_become_spaces_and_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A:\n" + "x" * 200 + "é" + "y" * 200)
    dataset = text.load(tmp_path)
    assert decoded(dataset.x[150])[50] == " "
    assert dataset.remarks[1] == "text: 1 characters outside the 80 known ones, read as spaces"
    (tmp_path / "a.txt").write_text("A:\n" + "x" * 200 + "é" * 10)
    with pytest.raises(InputError, match=r"another alphabet: expected at most 1% of characters outside .*, got 10"):
        text.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"Act 1\n\nA:\nHello", "no role speaks the first line: expected 'ROLE:', got 'Act 1'"),
        (b"A:\nHello\n", "no role speaks more than 80 characters"),
        (b"", "no role speaks more than 80 characters"),
        (b"A:\n\xff\xfe\x00", "not a text in UTF-8"),
    ],
)
def test_texts_that_are_none(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(InputError, match=message):
        text.load(tmp_path)


def test_which_file_is_meant(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not one text file: got none"):
        text.load(tmp_path)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(PLAY)
    with pytest.raises(InputError, match=r"not one text file: got a.txt, b.txt; name it by --raw"):
        text.load(tmp_path)


def test_the_80_characters_are_leafs() -> None:
    assert len(set(text.LEAF_LETTERS)) == 80
    codes = text.Alphabet(text.LEAF_LETTERS).encode(text.LEAF_LETTERS)
    assert codes.tolist() == list(range(80))


def test_tinyshakespeare() -> None:
    folder = shared_folder("data/Shakespeare")
    if folder is None:
        pytest.skip("needs tinyshakespeare.txt in $HPCFED_SHARED/data/Shakespeare")
    dataset = text.load(folder / "tinyshakespeare.txt")
    assert (len(dataset.clients), len(dataset.y), len(dataset.test_y)) == (255, 804_136, 183_933)
    assert dataset.clients[:4] == ("First Citizen", "All", "Second Citizen", "MENENIUS")
    assert decoded(dataset.x[0]).startswith("Before we proceed any further, hear me speak.\nYou are all resolved")
    content = (folder / "tinyshakespeare.txt").read_text()
    longest = np.bincount(dataset.owner).argmax()
    row = int(np.flatnonzero(dataset.owner == longest)[5])
    assert decoded(dataset.x[row]).split("\n")[0] in content
    assert "text: 1 characters outside" in dataset.remarks[1]
