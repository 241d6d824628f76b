"""Bytes at random: what a disk, a network or an enemy makes of a sound file."""

from __future__ import annotations

import re
import struct

import numpy as np

Rng = np.random.Generator
SIZES = (0, 1, 2, -1, 1 << 20, 1 << 31, 1 << 32, 1 << 60, -(1 << 63), (1 << 63) - 1)
TOKENS = (b"1e999", b"NaN", b"1152921504606846976", b"-1", b"0.5", b"null", b"true", b"[]", b"{}", b'""', b"", b",",
          b"[" * 5000, b'"\\ud800"', b"\xff", b"1" * 400, b'"users"', b"\x00", b"\n", b"\r", b'"\x1b[2J"', b"1" * 5000,
          b"<script>", b"-0.0", b"1e-320")  # fmt: skip


def cut(content: bytes, rng: Rng, _: int) -> bytes:
    """Keep only the first bytes."""
    return content[: int(rng.integers(len(content)))]


def bits(content: bytes, rng: Rng, head: int) -> bytes:
    """Flip a few bits of the head."""
    data = bytearray(content)
    for place in rng.integers(0, min(head, len(data)), int(rng.integers(1, 9))):
        data[place] ^= 1 << int(rng.integers(8))
    return bytes(data)


def number(content: bytes, rng: Rng, head: int) -> bytes:
    """Write a remarkable number over some bytes of the head, in either order: sizes and lengths among them."""
    order, width = ("<", ">")[int(rng.integers(2))], int(rng.choice([1, 2, 4, 8]))
    value = SIZES[int(rng.integers(len(SIZES)))] & (256**width - 1)
    packed = struct.pack(f"{order}{'xBHxIxxxQ'[width]}", value)
    place = int(rng.integers(0, max(1, min(head, len(content)) - width)))
    return content[:place] + packed + content[place + width :]


def shifted(content: bytes, rng: Rng, head: int) -> bytes:
    """Leave out or repeat some bytes, so that what follows stands elsewhere."""
    start, length = int(rng.integers(min(head, len(content)))), int(rng.integers(1, 33))
    piece = content[start : start + length]
    return content[:start] + piece * int(rng.choice([0, 2])) + content[start + length :]


def anywhere(content: bytes, rng: Rng, _: int) -> bytes:
    """Replace bytes anywhere."""
    start, length = int(rng.integers(len(content))), int(rng.integers(1, 33))
    return content[:start] + rng.bytes(len(content[start : start + length])) + content[start + length :]


def token(content: bytes, rng: Rng, _: int) -> bytes:
    """Replace a word, a number or a sign of a text by another."""
    spans = [match.span() for match in re.finditer(rb'-?[0-9.]+|"[^"]*"|[][{},:\n]', content)][:2000]
    if not spans:
        return anywhere(content, rng, 0)
    start, stop = spans[int(rng.integers(len(spans)))]
    return content[:start] + TOKENS[int(rng.integers(len(TOKENS)))] + content[stop:]


OF_HEADS = (cut, bits, bits, number, number, number, shifted)
OF_BYTES = (*OF_HEADS, anywhere, anywhere)
OF_TEXTS = (cut, shifted, token, token, token, token, anywhere, bits)


def mutated(content: bytes, rng: Rng, *, is_text: bool, head: int = 1 << 20) -> tuple[str, bytes]:
    """Return what was done, and the bytes that came of it."""
    mutations = OF_TEXTS if is_text else OF_BYTES
    mutate = mutations[int(rng.integers(len(mutations)))]
    return mutate.__name__, mutate(content, rng, head)
