"""Raw files of every reader of `data_prep.sources`: sound ones, damaged, and read as ``hpcfed prepare`` does."""

from __future__ import annotations

import gzip
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from data_prep.dataset import Dataset
from data_prep.sources import cifar, cinic, emnist, idx, leaf_json, own, text, tff
from data_prep.split import split
from data_prep.write import write
from hpcfed.data.federation import Federation
from tests.data import raw_formats as raw
from tests.data.raw import write_idx_folder
from tests.data.test_text import PLAY
from tests.fuzz import references
from tests.fuzz.mutations import Rng, mutated

HEAD, HEAD_OF_HDF5, ALL = 192, 1 << 14, 1 << 20
"""Bytes at the start of a file that say what the rest is; some formats say it at the end."""
Codec = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]


@dataclass(frozen=True)
class Case:
    """One reader.

    Attributes:
        write: writes sound files into a folder.
        load: reads it.
        codec: unpacks and packs the content of a file that is compressed.
        is_text: of words, numbers and signs.
        head: bytes of a file that most mutations change.
        reference: x and y of the training samples, as another library reads the same files; its errors of any kind say
            only that it cannot.
    """

    write: Callable[[Path], object]
    load: Callable[[Path], Dataset]
    codec: Codec | None = None
    is_text: bool = False
    head: int = HEAD
    reference: Callable[[Path], tuple[np.ndarray, np.ndarray]] | None = None


def unpacked_mat(content: bytes) -> bytes:
    return content[:128] + zlib.decompress(content[136:])


def packed_mat(content: bytes) -> bytes:
    packed = zlib.compress(content[128:])
    return content[:128] + struct.pack("<2I", 15, len(packed)) + packed


def cinic_archive(folder: Path) -> None:
    sound = folder / "unpacked"
    sound.mkdir()
    raw.write_cinic(sound)
    raw.pack_cinic(sound, folder / cinic.ARCHIVE)
    shutil.rmtree(sound)


def leaf(data: Callable[[int], dict]) -> Callable[[Path], None]:
    def written(folder: Path) -> None:
        for seed, half in enumerate(("train", "test")):
            raw.write_leaf(folder / half / "all_data_0.json", data(seed))

    return written


def shakespeare(seed: int) -> dict[str, tuple[list, list]]:
    said = "abcdefghij" * 9
    return {role: ([said[seed : seed + 80]], [said[seed + 80]]) for role in raw.ROLES}


def vectors(seed: int) -> dict[str, tuple[list, list]]:
    return {f"f_{k}": ([[seed + 0.5, k], [1e-3, -2.0]], [float(k), 1.0]) for k in range(3)}


def tff_files(stem: str, fields: Callable[[Rng], dict]) -> Callable[[Path], None]:
    def written(folder: Path) -> None:
        for seed, half in enumerate(("train", "test")):
            rng = np.random.default_rng(seed)
            raw.write_tff(folder / f"{stem}_{half}.h5", {name: fields(rng) for name in raw.WRITERS})

    return written


def characters(rng: Rng) -> dict:
    pixels = (rng.integers(0, 256, (2, 28, 28)) / 255).astype(np.float32)
    return {"pixels": pixels, "label": rng.integers(0, 62, 2).astype(np.int32)}


def colours(rng: Rng) -> dict:
    return {"image": rng.integers(0, 256, (2, 32, 32, 3), np.uint8), "label": rng.integers(0, 100, (2, 1))}


def snippets(rng: Rng) -> dict:
    return {"snippets": [bytes(rng.integers(97, 122, 70, np.uint8)) for _ in range(3)]}


def tables(folder: Path) -> None:
    for k in range(2):
        (folder / f"c{k}.csv").write_text("a,b,y\n" + "".join(f"{i}.5,{k},{i % 3}\n" for i in range(5)))


def arrays() -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        yield name, {"x": rng.normal(size=(6, 4)).astype(np.float32), "y": rng.integers(0, 3, 6)}


def npz(folder: Path) -> None:
    for name, pair in arrays():
        (np.savez_compressed if name == "a" else np.savez)(folder / f"{name}.npz", **pair)


def npy(folder: Path) -> None:
    for name, pair in arrays():
        for which, array in pair.items():
            np.save(folder / f"{name}.{which}.npy", array)


def parquet(folder: Path) -> None:
    for name, pair in arrays():
        columns = {f"x{i}": pair["x"][:, i] for i in range(4)} | {"y": pair["y"]}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{name}.parquet")


def images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for place in ("a/cat", "a/dog", "b/cat"):
        (folder / place).mkdir(parents=True)
        (folder / place / "1.png").write_bytes(raw.png(rng.integers(0, 256, (3, 8, 8), np.uint8)))


def letters(split_name: str, form: Callable[..., object]) -> Callable[[Path], None]:
    _, _, num_classes, first = emnist.SPLITS[split_name]
    return lambda folder: form(folder, split_name, raw.emnist(split_name, num_classes, first))


def binary(version: cifar.Version) -> Callable[[Path], object]:
    return lambda folder: raw.write_cifar_binary(folder, version)


def python(version: cifar.Version) -> Callable[[Path], object]:
    return lambda folder: raw.write_cifar_python(folder, version)


GZIP: Codec = (gzip.decompress, gzip.compress)
CASES = {
    "idx": Case(write_idx_folder, lambda folder: idx.load(folder, idx.MNIST), reference=references.by_hand),
    "idx.gz": Case(letters("letters", raw.write_emnist_idx), emnist.load_letters, GZIP, reference=references.by_gzip),
    "mat": Case(
        letters("digits", raw.write_emnist_mat),
        lambda f: emnist.load(f, "digits"),
        (unpacked_mat, packed_mat),
        reference=references.by_scipy,
    ),
    "cifar10 binary": Case(binary(cifar.CIFAR10), cifar.load10, reference=references.by_rows),
    "cifar10 python": Case(python(cifar.CIFAR10), cifar.load10, reference=references.by_pickle(cifar.CIFAR10)),
    "cifar100 python": Case(python(cifar.CIFAR100), cifar.load100, reference=references.by_pickle(cifar.CIFAR100)),
    "cinic": Case(raw.write_cinic, cinic.load, reference=references.by_pillow_cinic),
    "cinic.tar.gz": Case(cinic_archive, cinic.load, GZIP, reference=references.by_tarfile),
    "femnist": Case(leaf(raw.leaf_images), leaf_json.load_femnist, is_text=True, reference=references.by_json),
    "leaf shakespeare": Case(
        leaf(shakespeare), leaf_json.load_shakespeare, is_text=True, reference=references.by_json_text
    ),
    "leaf vectors": Case(leaf(vectors), leaf_json.load_vectors, is_text=True, reference=references.by_json),
    "fed-emnist": Case(
        tff_files("fed_emnist", characters),
        tff.load_emnist,
        head=HEAD_OF_HDF5,
        reference=references.by_h5py("fed_emnist", "pixels"),
    ),
    "fed-cifar100": Case(
        tff_files("fed_cifar100", colours),
        tff.load_cifar100,
        head=HEAD_OF_HDF5,
        reference=references.by_h5py("fed_cifar100", "image"),
    ),
    "fed-shakespeare": Case(
        tff_files("shakespeare", snippets), tff.load_shakespeare, head=HEAD_OF_HDF5, reference=references.by_h5py_text
    ),
    "text": Case(lambda folder: (folder / "a.txt").write_text(PLAY * 3), text.load, is_text=True),
    "csv": Case(tables, own.load, is_text=True, reference=references.by_pandas),
    "npz": Case(npz, own.load, head=ALL, reference=references.by_numpy),
    "npy": Case(npy, own.load, reference=references.by_numpy),
    "parquet": Case(parquet, own.load, head=ALL, reference=references.by_parquet),
    "images": Case(images, own.load, reference=references.by_pillow),
}


def read_all(folder: Path, case: Case) -> None:
    """Read a folder as `hpcfed prepare` does, write the federation and open it."""
    dataset = case.load(folder)
    assert len(dataset.x) == len(dataset.y) > 0
    if case.reference is not None:
        try:
            theirs = case.reference(folder)
        except Exception:  # a library may refuse what ours need not look at
            pass
        else:
            references.check_same((dataset.x, dataset.y), theirs)
    done = split(dataset, None, None if dataset.owner is not None else 2, 0, {})
    write(folder / "f.h5", dataset, **vars(done))
    with Federation.open(folder / "f.h5") as federation:
        for k in range(federation.num_clients):
            x, _ = federation.client(k)
            assert np.isfinite(x.sum(dtype=np.float64))


@cache
def sound(name: str) -> dict[str, bytes]:
    """Return the sound files of a reader, by their names below its folder."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        CASES[name].write(place)
        return {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def attempt(folder: Path, seed: int) -> None:
    """Damage a raw file of one of the readers, and read all."""
    rng = np.random.default_rng([seed, 1])
    name = list(CASES)[seed % len(CASES)]
    case, place, files = CASES[name], folder / str(seed), sound(name)
    damaged = list(files)[int(rng.integers(len(files)))]
    unpack, pack = case.codec if case.codec and rng.random() < 0.8 else (bytes, bytes)
    what, content = mutated(unpack(files[damaged]), rng, is_text=case.is_text, head=case.head)
    print(f"    {name}: {what} in {damaged}", flush=True)
    try:
        for path, whole in {**files, damaged: pack(content)}.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(whole)
        read_all(place, case)
    finally:
        shutil.rmtree(place)
