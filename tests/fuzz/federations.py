"""Federation files: sound ones, damaged in structure or content, and read as a run and ``hpcfed inspect`` do."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import h5py
import numpy as np

from data_prep.own import write_federation
from hpcfed.data.content import content_hash
from hpcfed.data.federation import Federation
from hpcfed.data.picture import text_heat_map
from hpcfed.data.sites import absences, labels_of, mean_differences, missing_shares, site_names, target_statistics
from tests.fuzz.mutations import SIZES, Rng

LAYOUTS = ("ours", "flat", "ours", "chunked", "ours", "tokens")
OURS = (9, 0, 11, 11, 9)


def whole(path: Path, layout: str) -> None:
    """Write a sound federation: ours, or one of another program's, contiguous, packed or of tokens."""
    if layout == "ours":
        rng = np.random.default_rng(0)
        clients = {f"c{k}": (rng.normal(size=(n, 3, 4)), rng.integers(0, 4, n)) for k, n in enumerate(OURS)}
        write_federation(path, clients, test=clients, num_classes=4, normalization=([0.5], [0.2]), vocabulary=["a"])
        return
    rng = np.random.default_rng(0)
    options = {"chunks": True, "compression": "gzip"} if layout == "chunked" else {}
    with h5py.File(path, "w") as file:
        attributes = {"format": "hpcfed-federation", "version": 1, "name": "f", "num_classes": 4}
        file.attrs.update({**attributes, "task": "next-token" if layout == "tokens" else "classification"})
        file.attrs["partition"] = json.dumps({"scheme": "natural", "clients": 5})
        file.attrs["normalization"] = json.dumps({"mean": [0.5], "std": [0.2]})
        file.attrs["vocabulary"] = json.dumps(["a", "b", "c", "d"])
        draw = partial(rng.integers, 0, 4, dtype=np.uint8) if layout == "tokens" else rng.standard_normal
        for part, count, offsets in (("train", 40, [0, 9, 9, 20, 31, 40]), ("test", 10, [0, 2, 4, 6, 8, 10])):
            x = draw(size=(count, 3, 4))
            file.create_dataset(f"{part}/x", data=x if layout == "tokens" else x.astype(np.float32), **options)
            file.create_dataset(f"{part}/y", data=rng.integers(0, 4, count), **options)
            file.create_dataset(f"{part}/offsets", data=np.array(offsets), **options)
        file["train/client"] = np.array([f"c{k}".encode() for k in range(5)], h5py.string_dtype("utf-8", 4))
        file.attrs["content"] = content_hash(file)


def cut(path: Path, rng: Rng, _: np.ndarray) -> str:
    """Keep only the first bytes."""
    size = int(rng.integers(0, path.stat().st_size))
    path.write_bytes(path.read_bytes()[:size])
    return f"cut to {size}"


def bits(path: Path, rng: Rng, structure: np.ndarray) -> str:
    """Flip a few bits of HDF5's structures, which are all but the samples."""
    data = bytearray(path.read_bytes())
    places = rng.choice(structure, int(rng.integers(1, 9)))
    for place in places:
        data[place] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)
    return f"bits at {places.tolist()}"


def number(path: Path, rng: Rng, structure: np.ndarray) -> str:
    """Write a remarkable number over eight bytes of HDF5's structures: sizes, addresses and counts among them."""
    data = bytearray(path.read_bytes())
    place = min(int(rng.choice(structure)), len(data) - 8)
    value = SIZES[int(rng.integers(len(SIZES)))]
    data[place : place + 8] = struct.pack("<q", value)
    path.write_bytes(data)
    return f"{value} at {place}"


def anywhere(path: Path, rng: Rng, _: np.ndarray) -> str:
    """Replace bytes anywhere."""
    data = bytearray(path.read_bytes())
    start, length = int(rng.integers(len(data))), int(rng.integers(1, 33))
    data[start : start + length] = rng.bytes(len(data[start : start + length]))
    path.write_bytes(data)
    return f"{length} bytes at {start}"


def attribute(path: Path, rng: Rng, _: np.ndarray) -> str:
    """Replace an attribute by something of another kind or size."""
    others = (None, "", "x" * 70_000, b"\xff\xfe", 0, -1, 1 << 60, 2.5, np.nan, np.zeros(3), "[" * 50_000, "NaN", "{}",
              '{"mean": [NaN], "std": [1]}', '{"mean": 0, "std": 1e999}', '{"mean": [[0]], "std": [[1]]}',
              h5py.Empty("f"), "null", "[1, 2]", np.array([b"a", b"b"]), True)  # fmt: skip
    with h5py.File(path, "r+") as file:
        name = str(rng.choice(sorted(file.attrs)))
        value = others[int(rng.integers(len(others)))]
        del file.attrs[name]
        if value is not None:
            try:
                file.attrs[name] = value
            except (OSError, RuntimeError):  # too large for an attribute
                file.attrs[name] = "y" * 1000
    return f"attribute {name} = {str(value)[:20]!r}"


def array(path: Path, rng: Rng, _: np.ndarray) -> str:
    """Replace a dataset by one with a semantic fault, or by one that only claims its size."""
    names = ("train/x", "train/y", "train/offsets", "test/x", "test/y", "test/offsets", "train/client")
    name = names[int(rng.integers(len(names)))]
    with h5py.File(path, "r+") as file:
        old = file[name][()]
        kind = int(rng.integers(9))
        del file[name]
        if kind == 0:
            file[name] = np.roll(old, 1, axis=0)
        elif kind == 1:
            file[name] = old[::-1]
        elif kind == 2 and old.dtype.kind in "iuf":
            file[name] = old.astype(np.float64 if old.dtype.kind == "f" else np.int64) * (1 << 40)
        elif kind == 3 and old.dtype.kind in "iuf":
            damaged = old.astype(np.float64)
            damaged.flat[int(rng.integers(damaged.size))] = rng.choice([np.nan, np.inf, -1e308])
            file[name] = damaged
        elif kind == 4 and old.dtype.kind in "iu":
            damaged = old.astype(np.int64)
            damaged.flat[int(rng.integers(damaged.size))] = int(rng.choice(SIZES))
            file[name] = damaged
        elif kind == 5:
            file[name] = old[: int(rng.integers(len(old)))]
        elif kind == 6:
            dtype = old.dtype if old.dtype.kind in "iuf" else np.float32
            chunks = (1024, *old.shape[1:]) if rng.integers(2) else None
            most = 1 << 60 if chunks is None else 1 << 50
            file.create_dataset(name, (most // max(1, old[0].size), *old.shape[1:]), dtype, chunks=chunks)
        elif kind == 7:
            file[name] = h5py.ExternalLink("absent.h5", "/x")
        elif kind == 8:
            file.create_group(name)
    return f"dataset {name}, fault {kind}"


STRUCTURAL = (cut, bits, bits, number, number, number, attribute, array)
MUTATIONS: tuple[Callable[[Path, Rng, np.ndarray], str], ...] = (*STRUCTURAL, array, anywhere)


def _structure(path: Path) -> np.ndarray:
    """Return the places of all bytes that are not samples."""
    places = np.ones(path.stat().st_size, bool)
    with h5py.File(path) as file:
        for name in ("train/x", "test/x"):
            start = file[name].id.get_offset()
            if start is not None:
                places[start : start + file[name].nbytes] = False
    return np.flatnonzero(places)


def read_all(path: Path) -> int:
    """Read all that a run and `hpcfed inspect` read; return the number of samples."""
    total = 0
    with Federation.open(path, "mmap" if path.stat().st_size % 2 else "memory") as federation:
        for k in range(min(federation.num_clients, 10_000)):
            x, y = federation.client(k)
            assert len(x) == len(y) == federation.sizes[k]
            assert x.dtype == federation.x_dtype
            _check_same(path, k, x, y)
            total += int(np.isfinite(x.sum(dtype=np.float64))) + len(federation.client_name(k))
        for part in federation.test(0, federation.num_test):
            assert len(part) == federation.num_test
        labels, names = labels_of(federation), site_names(federation)
        if labels is not None:
            text_heat_map(labels.counts, names)
            list(absences(federation, labels))
        if federation.num_clients < 100:
            mean_differences(federation)
            missing_shares(federation)
            target_statistics(federation)
    return total


def _check_same(path: Path, k: int, x: np.ndarray, y: np.ndarray) -> None:
    """Compare a client's samples with those that h5py reads, if it can."""
    try:
        with h5py.File(path, locking=False) as file:
            rows = slice(*(int(place) for place in file["train/offsets"][k : k + 2]))
            theirs = file["train/x"][rows], file["train/y"][rows]
    except Exception:  # a library may refuse what ours need not look at
        return
    for ours, other in zip((x, y), theirs, strict=True):
        np.testing.assert_array_equal(ours, other)


@cache
def sound(layout: str) -> tuple[bytes, np.ndarray]:
    """Return a sound federation file, and the places of all its bytes that are not samples."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sound.h5"
        whole(path, layout)
        return path.read_bytes(), _structure(path)


def attempt(folder: Path, seed: int) -> None:
    """Damage a federation file, and read all of it."""
    rng = np.random.default_rng(seed)
    path = folder / f"{seed}.h5"
    content, structure = sound(LAYOUTS[seed % len(LAYOUTS)])
    path.write_bytes(content)
    mutate = MUTATIONS[int(rng.integers(len(MUTATIONS)))]
    print(f"    {mutate.__name__}: {mutate(path, rng, structure)}", flush=True)
    try:
        read_all(path)
    finally:
        path.unlink()
