"""Packing of what clients send, to the bit: the bytes that `Coding` counts are those of a form that can be unpacked."""

from __future__ import annotations

import numpy as np
import torch

from hpcfed.updates._coding import Coding


def bits_of(numbers: np.ndarray, count: int) -> np.ndarray:
    """Whole numbers from 0 as rows of so many bits."""
    return (numbers.astype(np.uint64)[:, None] >> np.arange(count, dtype=np.uint64) & np.uint64(1)).astype(np.uint8)


def numbers_of(bits: np.ndarray, count: int) -> np.ndarray:
    """The inverse of `bits_of`."""
    return (bits.reshape(-1, count).astype(np.uint64) << np.arange(count, dtype=np.uint64)).sum(1).astype(np.int64)


def pack(coding: Coding, codes: np.ndarray, places: np.ndarray | None, scales: np.ndarray) -> bytes:
    """One row of bits: the numbers' codes, their places, the scales."""
    rows = [bits_of(codes, coding.bits).ravel()]
    if coding.place_bits:
        assert places is not None
        rows.append(bits_of(places, coding.place_bits).ravel())
    rows.append(np.unpackbits(np.ascontiguousarray(scales).view(np.uint8)))
    return np.packbits(np.concatenate(rows)).tobytes()


def unpack(coding: Coding, packed: bytes, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """The inverse of `pack`."""
    row = np.unpackbits(np.frombuffer(packed, np.uint8))
    ends = np.cumsum([coding.values * coding.bits, coding.values * coding.place_bits])
    codes, places, scales = np.split(row[: ends[1] + coding.scales * coding.number_bits], ends)
    where = numbers_of(places, coding.place_bits) if coding.place_bits else None
    return numbers_of(codes, coding.bits), where, np.packbits(scales).view(dtype)


def spread(values: np.ndarray, places: np.ndarray | None, entries: int) -> torch.Tensor:
    """A vector with values at some places, or at all."""
    if places is None:
        return torch.from_numpy(values)
    out = np.zeros(entries, values.dtype)
    out[places] = values
    return torch.from_numpy(out)
