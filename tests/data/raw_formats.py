"""Small raw files in exactly the published formats: layout, byte order, names. Contents come from a seed."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tarfile
from pathlib import Path

import h5py
import numpy as np
from PIL import Image
from scipy.io import savemat

from data_prep.sources import cifar, cinic
from tests.data.raw import idx_bytes

CIFAR_BATCH = 6
CINIC_PER_CLASS = 2
WRITERS = ("f0001_41", "f0007_12", "f0011_03")
ROLES = ("THE_TRAGEDY_OF_KING_LEAR_KING", "PERICLES__PRINCE_OF_TYRE_FISHERMAN")


def emnist(split: str, num_classes: int, first: int, seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return ``train`` and ``test``: upright images (n, 28, 28) uint8, and labels (n,) as the files count them."""
    rng = np.random.default_rng(seed)
    sizes = {"train": 40, "test": 12}
    return {
        part: (rng.integers(0, 256, (n, 28, 28), np.uint8), rng.integers(first, first + num_classes, n, np.uint8))
        for part, n in sizes.items()
    }


def write_emnist_idx(folder: Path, split: str, parts: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Write the four gzipped IDX files, images column by column."""
    for part, (images, labels) in parts.items():
        for kind, array in (("images-idx3", images.transpose(0, 2, 1)), ("labels-idx1", labels)):
            name = f"emnist-{split}-{part}-{kind}-ubyte.gz"
            (folder / name).write_bytes(gzip.compress(idx_bytes(np.ascontiguousarray(array))))


def write_emnist_mat(
    folder: Path, split: str, parts: dict[str, tuple[np.ndarray, np.ndarray]], compress: bool = True
) -> Path:
    """Write ``dataset`` with train, test and mapping; rows are images column by column, labels are doubles."""
    halves = {
        part: {
            "images": images.transpose(0, 2, 1).reshape(len(images), -1),
            "labels": labels[:, None].astype(np.float64),
            "writers": np.arange(len(labels), dtype=np.float64)[:, None],
        }
        for part, (images, labels) in parts.items()
    }
    mapping = np.array([[k, 48 + k] for k in range(5)], np.float64)
    path = folder / f"emnist-{split}.mat"
    savemat(path, {"dataset": {**halves, "mapping": mapping}}, do_compression=compress)
    return path


def write_cifar_binary(folder: Path, version: cifar.Version, seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Write all batches; return file → pixels (m, 3072) and labels (m,)."""
    rng, batches = np.random.default_rng(seed), {}
    folder.mkdir(parents=True, exist_ok=True)
    for name in version.binary:
        pixels = rng.integers(0, 256, (CIFAR_BATCH, 3072), np.uint8)
        labels = rng.integers(0, version.num_classes, CIFAR_BATCH, np.uint8)
        coarse = [] if version.label_bytes == 1 else [(labels // 5)[:, None]]
        (folder / name).write_bytes(np.hstack([*coarse, labels[:, None], pixels]).astype(np.uint8).tobytes())
        batches[name] = pixels, labels
    return batches


def python2_pickle(pixels: np.ndarray, labels: list[int], key: str) -> bytes:
    """Return a batch as Python 2 pickled it in protocol 2: text is bytes, and so is what an array holds."""

    def text(value: bytes) -> bytes:
        if len(value) < 256:
            return b"U" + bytes([len(value)]) + value
        return b"T" + struct.pack("<i", len(value)) + value

    def integer(value: int) -> bytes:
        return b"K" + bytes([value]) if 0 <= value < 256 else b"M" + struct.pack("<H", value)

    dtype = b"cnumpy\ndtype\nq\x0bU\x02u1K\x00K\x01\x87Rq\x0c(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x08cnumpy\nndarray\nq\x09K\x00\x85U\x01b\x87Rq\x0a(K\x01"
    array += integer(pixels.shape[0]) + integer(pixels.shape[1]) + b"\x86" + dtype + b"\x89" + text(pixels.tobytes())
    array += b"tb"
    items = [
        (b"batch_label", text(b"training batch 1 of 5")),
        (key.encode(), b"]q\x05(" + b"".join(map(integer, labels)) + b"e"),
        (b"data", array),
        (b"filenames", b"]q\x0d(" + b"".join(text(f"img_s_{i:06}.png".encode()) for i in range(len(labels))) + b"e"),
    ]
    return b"\x80\x02}q\x01(" + b"".join(text(name) + value for name, value in items) + b"u."


def write_cifar_python(
    folder: Path, version: cifar.Version, seed: int = 0, python: int = 2
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Write all batches as Python 2 did, or as Python 3 would; return file → pixels (m, 3072) and labels (m,)."""
    rng, batches = np.random.default_rng(seed), {}
    folder.mkdir(parents=True, exist_ok=True)
    for name in version.python:
        pixels = rng.integers(0, 256, (CIFAR_BATCH, 3072), np.uint8)
        labels = rng.integers(0, version.num_classes, CIFAR_BATCH).tolist()
        content = python2_pickle(pixels, labels, version.labels)
        if python == 3:
            content = pickle.dumps({version.labels: labels, "data": pixels}, protocol=4)
        (folder / name).write_bytes(content)
        batches[name] = pixels, np.array(labels)
    return batches


def png(pixels: np.ndarray) -> bytes:
    """Return (3, H, W) uint8 as a PNG."""
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(buffer, "PNG")
    return buffer.getvalue()


def write_cinic(folder: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """Write the three parts as folders of PNGs; return path below `folder` → pixels (3, 32, 32)."""
    rng, images = np.random.default_rng(seed), {}
    for part in cinic.PARTS:
        for kind in cinic.CLASSES:
            (folder / part / kind).mkdir(parents=True)
            for i in range(CINIC_PER_CLASS):
                name = f"{part}/{kind}/" + (f"n0{2000 + i}_11.png" if i else "cifar10-train-77.png")
                images[name] = rng.integers(0, 256, (3, 32, 32), np.uint8)
                (folder / name).write_bytes(png(images[name]))
    return images


def pack_cinic(folder: Path, archive: Path) -> None:
    """Pack the folders as the published archive has them: members ``./train/…``, and a text beside them."""
    with tarfile.open(archive, "w:gz") as tar:
        (folder / "README.md").write_text("CINIC-10")
        for path in sorted(folder.rglob("*"), reverse=True):  # in no order that a reader could rely on
            if path != archive:
                tar.add(path, f"./{path.relative_to(folder)}", recursive=False)


def write_leaf(path: Path, data: dict[str, tuple[list, list]], *, order: tuple[str, ...] = ()) -> None:
    """Write user → (x, y) as LEAF does; `order` is that of the file's three keys."""
    content = {
        "users": list(data),
        "num_samples": [len(y) for _, y in data.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in data.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({key: content[key] for key in order or content}))


def leaf_images(seed: int = 0, clients: tuple[str, ...] = WRITERS) -> dict[str, tuple[list, list]]:
    """Return writers of FEMNIST: pixels k / 255 as LEAF divides them, labels below 62."""
    rng = np.random.default_rng(seed)
    return {
        name: ((rng.integers(0, 256, (i + 2, 784)) / 255).tolist(), rng.integers(0, 62, i + 2).tolist())
        for i, name in enumerate(clients)
    }


def write_tff(path: Path, clients: dict[str, dict[str, np.ndarray | list[bytes]]]) -> None:
    """Write ``examples/<client>/<field>`` as TFF does: arrays as they are, text of variable length."""
    with h5py.File(path, "w") as file:
        for name, fields in clients.items():
            group = file.create_group(f"examples/{name}")
            for field, value in fields.items():
                if isinstance(value, list):
                    group.create_dataset(field, data=value, dtype=h5py.string_dtype())
                else:
                    group.create_dataset(field, data=value)
