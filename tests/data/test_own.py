"""Your own data: files and folders a client each, tables, arrays, torch datasets and generators, all the same file."""

from __future__ import annotations

import csv
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from PIL import Image, ImageOps
from pyarrow import parquet
from torch.utils.data import TensorDataset

import hpcfed
from data_prep.finish import finish
from data_prep.sources import own, own_arrays
from data_prep.split import split
from data_prep.write import write
from hpcfed.data.federation import Federation, Standardization
from hpcfed.errors import EnvironmentFailure, InputError

NAMES = ("east", "north", "west")
Arrays = tuple[np.ndarray, np.ndarray]


@pytest.fixture
def clients() -> dict[str, Arrays]:
    """Three clients of 7, 1 and 12 samples of 3 features, labels 0 to 2."""
    rng = np.random.default_rng(0)
    sizes = dict(zip(NAMES, (7, 1, 12), strict=True))
    return {name: (rng.normal(size=(n, 3)).astype(np.float32), rng.integers(0, 3, n)) for name, n in sizes.items()}


def check(path: Path, clients: dict[str, Arrays]) -> None:
    """Compare a federation with what went in, sample for sample."""
    with Federation.open(path) as federation:
        assert federation.client_names() == list(clients)
        for k, (x, y) in enumerate(clients.values()):
            got_x, got_y = federation.client(k)
            assert np.array_equal(got_x, x)
            assert np.array_equal(got_y, y)


def prepared(raw: Path, **options: object) -> Path:
    """Prepare own data as ``hpcfed prepare own --raw …`` does."""
    dataset = own.load(raw, **options)
    write(raw.parent / "own.h5", dataset, **vars(split(dataset, None, None, 0, {})), overwrite=True)
    return raw.parent / "own.h5"


def write_csv(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"x{j}" for j in range(x.shape[1])), "y"])
        writer.writerows([*map(float, row), label] for row, label in zip(x, y, strict=True))


def test_arrays_generators_and_torch_datasets_make_the_same_file(tmp_path: Path, clients: dict[str, Arrays]) -> None:
    def one_by_one(x: np.ndarray, y: np.ndarray) -> Iterator[Arrays]:
        yield from zip(x, y, strict=True)

    def of_torch(x: np.ndarray, y: np.ndarray) -> TensorDataset:
        return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))

    kinds = {
        "arrays": dict(clients),
        "tensors": {name: tuple(map(torch.from_numpy, arrays)) for name, arrays in clients.items()},
        "datasets": {name: of_torch(*arrays) for name, arrays in clients.items()},
        "generators": ((name, one_by_one(*arrays)) for name, arrays in clients.items()),
    }
    contents = {}
    for kind, given in kinds.items():
        contents[kind] = hpcfed.write_federation(tmp_path / kind, given, test=clients["east"], name="own")
        check(tmp_path / kind, clients)
    assert len(set(contents.values())) == 1
    assert (tmp_path / "arrays").read_bytes() == (tmp_path / "generators").read_bytes()
    with Federation.open(tmp_path / "arrays") as federation:
        assert (federation.name, federation.num_classes, federation.num_test) == ("own", 3, 7)
        assert federation.partition == {"scheme": "natural", "clients": 3}
        assert federation.test_offsets is None


def test_tests_of_clients_and_all_that_is_known(tmp_path: Path, clients: dict[str, Arrays]) -> None:
    images = {name: (np.full((len(y), 3, 2, 2), 7, np.uint8), y) for name, (_, y) in clients.items()}
    test = {"west": images["west"], "east": images["east"]}
    scale = ((0.5, 0.4, 0.3), (0.2, 0.2, 0.1))
    hpcfed.write_federation(tmp_path / "f.h5", images, test=test, num_classes=5, normalization=scale)
    with Federation.open(tmp_path / "f.h5") as federation:
        assert (federation.x_dtype, federation.y_dtype, federation.num_classes) == (np.uint8, np.uint8, 5)
        assert federation.normalization == Standardization(*scale)
        assert federation.test_offsets.tolist() == [0, 7, 7, 19]
        assert np.array_equal(federation.test(0, 19)[1], np.concatenate([images[k][1] for k in ("east", "west")]))


def test_regressions_and_tokens(tmp_path: Path) -> None:
    hpcfed.write_federation(tmp_path / "r.h5", {"a": (np.arange(6).reshape(3, 2), np.eye(3))}, task="regression")
    with Federation.open(tmp_path / "r.h5") as federation:
        assert (federation.x_dtype, federation.y_dtype) == (np.float32, np.float64)
        assert (federation.num_classes, federation.target_shape) == (None, (3,))
    for kind, stored in ((np.int64, np.float64), (np.uint8, np.float32)):
        y = np.array([[1], [2**24 + 1 if kind is np.int64 else 7]], kind)
        hpcfed.write_federation(tmp_path / "w.h5", {"a": (np.eye(2), y)}, task="regression", overwrite=True)
        with Federation.open(tmp_path / "w.h5") as federation:
            assert federation.y_dtype == stored
            assert np.array_equal(federation.client(0)[1], y)
    tokens = np.arange(10).reshape(2, 5) % 4
    hpcfed.write_federation(tmp_path / "t.h5", {"a": (tokens, tokens[:, 0])}, task="next-token", vocabulary="abcd")
    with Federation.open(tmp_path / "t.h5") as federation:
        assert (federation.x_dtype, federation.num_classes, federation.vocabulary) == (np.uint8, 4, "abcd")
        assert np.array_equal(federation.client(0)[0], tokens)


def test_tensors_and_masked_arrays_are_arrays(tmp_path: Path) -> None:
    """Of a tensor its value, in bfloat16, too; of a masked entry NaN, which `missing` fills."""
    x = torch.tensor([[1.0, 2.5], [3.0, 4.5]], requires_grad=True)
    masked = np.ma.MaskedArray([[9, 1.5], [7, 2.5]], [[True, False], [False, False]], np.float32)
    singles = [(row, k) for k, row in enumerate(x.bfloat16())]
    clients = {"grad": (x, [0, 1]), "half": (x.bfloat16(), [0, 1]), "singles": singles, "masked": (masked, [0, 1])}
    hpcfed.write_federation(tmp_path / "f.h5", clients, missing="median")
    with Federation.open(tmp_path / "f.h5") as federation:
        assert federation.x_dtype == np.float32
        for k in range(3):
            assert np.array_equal(federation.client(k)[0], x.detach())
        assert federation.client(3)[0].tolist() == [[3, 1.5], [7, 2.5]]


def test_columns_of_data_frames_are_found_by_name(tmp_path: Path) -> None:
    one = pandas.DataFrame({"age": [1, 2], "dose": [3.5, 4.5]})
    other = one[["dose", "age"]]
    label = pandas.DataFrame({"died": [0, 1]})
    clients = {"a": (one, label), "b": (other, label.rename(columns={"died": "dead"})), "c": (one.to_numpy(), [0, 1])}
    hpcfed.write_federation(tmp_path / "f.h5", clients, test=(other, label))
    with Federation.open(tmp_path / "f.h5") as federation:
        assert federation.features == ["age", "dose"]
        for x in (*(federation.client(k)[0] for k in range(3)), federation.test(0, 2)[0]):
            assert np.array_equal(x, one)
    clients["b"] = other.rename(columns={"dose": "weight"}), label
    message = (
        "client 'b': x: columns: expected age, dose, as before, got weight, age; give all the same columns, in any"
    )
    with pytest.raises(InputError, match=message):
        hpcfed.write_federation(tmp_path / "g.h5", clients)


@pytest.mark.parametrize(("wide", "dtype"), [(0, "=f8"), (1, "=f8"), (2, "=f8"), (0, ">f8"), (1, "<f8"), (2, "g")])
def test_samples_are_float64_where_any_is(tmp_path: Path, wide: int, dtype: str) -> None:
    """In any order of the clients, and if only the test set is; in any order of bytes, and from more bits."""
    parts = [(np.full((2, 3), 1 + 2**-40, dtype), np.full(2, 1 + 2**-40, dtype))] * 3
    parts = [part if k == wide else tuple(map(np.float32, part)) for k, part in enumerate(parts)]
    clients = dict(zip("ab", parts[:2], strict=True))
    hpcfed.write_federation(tmp_path / "f.h5", clients, test=parts[2], task="regression")
    with Federation.open(tmp_path / "f.h5") as federation:
        assert (federation.x_dtype, federation.y_dtype) == (np.float64, np.float64)
        for k, pair in enumerate((federation.client(0), federation.client(1), federation.test(0, 2))):
            assert all((array == (1 + 2**-40 if k == wide else 1)).all() for array in pair)


ROWS = np.zeros((4, 3), np.float32)
LABELS = np.array([0, 1, 2, 1])
SAMPLES = TensorDataset(torch.from_numpy(ROWS), torch.from_numpy(LABELS))


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({"a": (ROWS, LABELS[:3])}, {}, "client 'a': x and y differ in length: got 4 and 3"),
        ({"a": (ROWS, LABELS), "b": (ROWS[:, :2], LABELS)}, {}, r"client 'b': x: expected shape \(3,\) a sample"),
        ({"a": (ROWS.astype(np.uint8), LABELS), "b": (ROWS, LABELS)}, {}, "client 'b': x: expected uint8, as before"),
        (
            {"a": (ROWS, LABELS), "b": (ROWS.astype(np.uint8), LABELS)},
            {},
            "'b': x: expected float32, as before, got uint8; give all in one type: runs divide uint8 by 255",
        ),
        ({"a": (ROWS, LABELS)}, {"test": (ROWS.astype(np.uint8), LABELS)}, "test set: x: expected float32, as before"),
        (
            {"a": (np.ma.masked_equal(ROWS.astype(int), 0), LABELS)},
            {},
            "'a': x: expected no masked entry but in floating point, got 12; leave such samples out",
        ),
        ({"a": (ROWS, np.ma.masked_equal(LABELS, 1))}, {}, "client 'a': y: expected no masked entry, got 2; leave"),
        ({"a": (ROWS + 0j, LABELS)}, {}, "client 'a': x: expected numbers, got complex64"),
        ({"a": (ROWS + np.nan, LABELS)}, {}, "client 'a': x: sample 0, entry 0: expected finite numbers, got NaN"),
        ({"a": (ROWS, LABELS)}, {"num_classes": 2}, "client 'a': y: expected labels 0 … 1, got 0 … 2"),
        ({"a": (ROWS, LABELS - 1)}, {"num_classes": 3}, "client 'a': y: expected labels 0 … 2, got -1 … 1"),
        ({"a": (ROWS, LABELS + 0.5)}, {}, "client 'a': y: expected whole numbers"),
        (
            {"a": (LABELS.reshape(2, 2),) * 2},
            {"task": "next-token"},
            "'a': y: expected one target per sample, .*a sample",
        ),
        ({"a": (ROWS, np.eye(4))}, {}, r"one label a sample.*y.argmax\(1\).*task='multi-label'"),
        ({"a": (ROWS, 2 * np.eye(4))}, {}, "one label a sample.*task='regression'"),
        (
            {"a": (ROWS, LABELS + np.inf)},
            {"task": "regression"},
            "client 'a': y: sample 0: expected finite numbers",
        ),
        ({"a": (ROWS.astype(str), LABELS)}, {}, "client 'a': x: expected numbers"),
        ({"a": (ROWS, LABELS.astype(str))}, {"num_classes": 3}, "'a': y: expected numbers, got words; leave num_"),
        ({"a": (ROWS, np.array(["a", "b", " ", "a"]))}, {}, "client 'a': y: a label is empty"),
        ({"a": (ROWS, np.array([b"a", b"b", b"\xe9", b"\xe8"]))}, {}, r"'a': y: not UTF-8: got b'\\xe8'; give text"),
        (
            {"a": (ROWS, LABELS)},
            {"groups": {"a": np.array([b"a", b"b", b"\xe9", b"\xe8"])}},
            r"groups of client 'a': not UTF-8: got b'\\xe9'; give text",
        ),
        (SAMPLES, {}, r"clients: expected pairs \(name, samples\), or a mapping, got TensorDataset; name"),
        ([(ROWS, LABELS)], {}, r"clients: expected pairs \(name, samples\), or a mapping, got tuple of 2; name"),
        ({"a": 3}, {}, "client 'a': expected arrays .*, got int"),
        ({"a": [1, 2]}, {}, "client 'a': samples: expected pairs"),
        ({"a": (ROWS, LABELS)}, {"task": "clasification"}, "did you mean 'classification'"),
        ([("a", (ROWS, LABELS)), ("a", (ROWS, LABELS))], {}, "client 'a' is there twice"),
        ([("a\nb", (ROWS, LABELS))], {}, "client 'a\\\\nb': expected a name in one line"),
        ([("a\u2028", (ROWS, LABELS))], {}, "expected a name in one line"),
        ([("a\udcff", (ROWS, LABELS))], {}, r"client 'a\\udcff': expected a name in one line, in UTF-8"),
        ([("a" * 65_537, (ROWS, LABELS))], {}, "a client's name: expected at most 65,536 bytes, got 65,537"),
        ({"a": (ROWS[:0], LABELS[:0])}, {}, "no client has a sample"),
        ({"a": (ROWS, LABELS)}, {"test": {"b": (ROWS, LABELS)}}, "a test set of client 'b'"),
    ],
)
def test_wrong_samples_end_in_one_line(tmp_path: Path, given: object, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        hpcfed.write_federation(tmp_path / "f.h5", given, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_memory_does_not_grow_with_the_samples(tmp_path: Path) -> None:
    """200 MB of samples from generators; memory of the process's own counts, the page cache does not."""
    program = """
import sys, numpy as np, hpcfed, psutil
rows = np.ones((100_000,), np.float32)
def client(k):
    for i in range(50):
        yield rows, k % 3
peak, own = 0, psutil.Process().memory_full_info
before = own().uss
def clients():
    global peak
    for k in range(10):
        yield str(k), client(k)
        peak = max(peak, own().uss)
hpcfed.write_federation(sys.argv[1], clients())
print(max(peak, own().uss) - before)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "f.h5")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "f.h5").stat().st_size > 200e6
    assert int(done.stdout) < 120e6


def test_a_file_per_client(tmp_path: Path, clients: dict[str, Arrays]) -> None:
    for kind in ("npz", "npy", "csv"):
        raw = tmp_path / kind
        raw.mkdir()
        for name, (x, y) in {**clients, "test": clients["west"]}.items():
            if kind == "npz":
                np.savez_compressed(raw / f"{name}.npz", x=x, y=y)
            elif kind == "npy":
                np.save(raw / f"{name}.x.npy", np.asfortranarray(x))
                np.save(raw / f"{name}.y.npy", y)
            else:
                write_csv(raw / f"{name}.csv", x, y)
        check(prepared(raw), clients)
        with Federation.open(tmp_path / "own.h5") as federation:
            assert (federation.name, federation.num_test, federation.num_classes) == (kind, 12, 3)


def test_parquet(tmp_path: Path, clients: dict[str, Arrays]) -> None:
    (tmp_path / "raw").mkdir()
    for name, (x, y) in clients.items():
        table = pyarrow.table({**{f"x{j}": x[:, j] for j in range(3)}, "y": y})
        parquet.write_table(table, tmp_path / "raw" / f"{name}.parquet")
    check(prepared(tmp_path / "raw"), clients)
    (tmp_path / "raw" / "west.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match=r"west.parquet: (no Parquet file, or damaged|can't be read)"):
        own.load(tmp_path / "raw")


def test_one_table_with_a_client_column_and_named_classes(tmp_path: Path, clients: dict[str, Arrays]) -> None:
    words = np.array(["cat", "dog", "emu"])
    rows = [(name, x, y) for name, arrays in clients.items() for x, y in zip(*arrays, strict=True)]
    order = np.random.default_rng(1).permutation(len(rows))
    with (tmp_path / "all.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["site", "a", "b", "c", "animal"])
        writer.writerows([name, *map(float, x), words[y]] for name, x, y in (rows[i] for i in order))
    path = prepared(tmp_path / "all.csv", target="animal", client_column="site")
    with Federation.open(path) as federation:
        assert sorted(federation.client_names()) == list(NAMES)
        assert federation.source["classes"] == ["cat", "dog", "emu"]
        for k, name in enumerate(federation.client_names()):
            mine = [i for i in order if rows[i][0] == name]
            assert np.array_equal(federation.client(k)[0], np.stack([rows[i][1] for i in mine]))
            assert federation.client(k)[1].tolist() == [rows[i][2] for i in mine]


def test_tables_of_a_regression_and_tests_of_clients(tmp_path: Path, clients: dict[str, Arrays]) -> None:
    (tmp_path / "raw" / "test").mkdir(parents=True)
    for name, (x, y) in clients.items():
        write_csv(tmp_path / "raw" / f"{name}.csv", x, y * 0.5)
        write_csv(tmp_path / "raw" / "test" / f"{name}.csv", x[:1], y[:1])
    with Federation.open(prepared(tmp_path / "raw", task="regression", target="x2,y")) as federation:
        assert (federation.feature_shape, federation.target_shape) == ((2,), (2,))
        assert np.array_equal(federation.client(0)[1][:, 1], clients["east"][1] * 0.5)
        assert federation.test_offsets.tolist() == [0, 1, 2, 3]


def test_a_folder_of_images_per_client(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    pixels = {}
    for client, label in (("ann", "cat"), ("ann", "dog"), ("bob", "dog"), ("test", "cat")):
        folder = tmp_path / "raw" / client / label
        folder.mkdir(parents=True)
        pixels[client, label] = rng.integers(0, 256, (5, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels[client, label]).save(folder / "1.png")
    with Federation.open(prepared(tmp_path / "raw")) as federation:
        assert (federation.client_names(), federation.num_test) == (["ann", "bob"], 1)
        assert federation.source["classes"] == ["cat", "dog"]
        x, y = federation.client(0)
        assert y.tolist() == [0, 1]
        assert np.array_equal(x[1], pixels["ann", "dog"].transpose(2, 0, 1))
        assert federation.client(1)[1].tolist() == [1]
    (tmp_path / "raw" / "bob" / "dog" / "1.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"1.png: no image, or damaged"):
        own.load(tmp_path / "raw")


def test_an_image_with_a_part_of_a_claimed_size_is_refused(tmp_path: Path) -> None:
    """Pillow takes 4 GB for it at once; the limit leaves room for the libraries."""
    path = tmp_path / "1.png"
    Image.new("L", (4, 4)).save(path)
    content = bytearray(path.read_bytes())
    place = content.index(b"IDAT")
    content[place - 4 : place] = (0xFFFFFFF0).to_bytes(4, "big")
    path.write_bytes(content)
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "from data_prep.sources.own_images import pixels\n"
        "from hpcfed.errors import InputError\n"
        "try: pixels(sys.argv[1], sys.argv[1], False)\n"
        "except InputError as error: print(error)"
    )
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "1.png: an image damaged, or larger than the memory" in done.stdout, done.stderr


def test_images_keep_their_depth_and_pools_are_dealt(tmp_path: Path) -> None:
    """A folder with one image of 16 bits becomes float32; classes without clients are refused unless dealt."""
    deep = np.array([[0, 255, 256, 65535]], np.uint16)
    flat = np.array([[0, 51, 102, 255]], np.uint8)
    for label, pixels in (("cat", deep), ("dog", flat)):
        (tmp_path / "raw" / label).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / "raw" / label / "1.png")
    with pytest.raises(InputError, match=r"no clients: expected CLIENT/CLASS/\*.png, got cat/1.png; .* by --partition"):
        own.load(tmp_path / "raw")
    dataset = own.load(tmp_path / "raw", partition="iid")
    assert (dataset.owner, dataset.x.dtype, dataset.source["classes"]) == (None, np.float32, ["cat", "dog"])
    assert np.array_equal(dataset.x[:, 0, 0], np.stack([deep[0] / 65535, flat[0] / 255]).astype(np.float32))
    Image.fromarray(np.ones((1, 4), np.float32)).save(tmp_path / "raw" / "cat" / "1.png", "tiff")
    with pytest.raises(InputError, match="an image of floating-point numbers; save it with 8 or 16 bits"):
        own.load(tmp_path / "raw", partition="iid")


def draw(path: Path, mode: str = "RGB", size: tuple[int, int] = (5, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size).save(path)


def test_images_left_out_and_classes_are_named(tmp_path: Path) -> None:
    for name in ("ann/cat/0.png", "ann/cat/1.JPG", "ann/cat/2.webp", "bob/Cat/3.tif", "bob/Cat/4.png", "bob/5.png"):
        draw(tmp_path / name)
    (tmp_path / "bob" / ".cache").mkdir()
    dataset = own.load(tmp_path)
    assert len(dataset.x) == 3
    assert dataset.remarks == (
        "2 classes: Cat, cat; positive: cat (--positive Cat for the other)",
        "classes 'Cat' and 'cat' look like one, written in two ways",
        "left out: 3 files: .png, .tif, .webp",
    )


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_exif_says(tmp_path: Path, orientation: int) -> None:
    """A photograph on its side has the size of one upright; its pixels are those that Pillow shows."""
    pixels = np.arange(20, dtype=np.uint8).reshape(4, 5)
    draw(tmp_path / "ann/dog/1.png", "L", (5, 4) if orientation < 5 else (4, 5))
    (tmp_path / "ann/cat").mkdir()
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / "ann/cat/0.png", exif=exif)
    with Image.open(tmp_path / "ann/cat/0.png") as image:
        shown = np.asarray(ImageOps.exif_transpose(image))
    assert np.array_equal(own.load(tmp_path).x[0, 0], shown)


def test_losses_of_images_are_reported(tmp_path: Path) -> None:
    """Transparency and further frames in a line, also of Parquet; colors of 16 bits, which Pillow cuts, are refused."""
    for k, mode in enumerate(("RGB", "RGBA")):
        draw(tmp_path / "raw" / "ann" / "cat" / f"{k}.png", mode)
        draw(tmp_path / "raw" / "ann" / "dog" / f"{k}.png", mode)
    frames = [Image.new("RGB", (5, 4), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "raw/ann/cat/2.png", save_all=True, append_images=frames[1:])
    lines = ("transparency is left out in 2 images", "several frames in 1 image: the first is used")
    assert own.load(tmp_path / "raw").remarks[1:] == lines
    files = sorted((tmp_path / "raw").rglob("*.png"))
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    images = pyarrow.array([{"bytes": path.read_bytes(), "path": None} for path in files], kind)
    table = pyarrow.table({"image": images, "y": [path.parent.name for path in files]})
    (tmp_path / "tables").mkdir()
    parquet.write_table(table, tmp_path / "tables" / "ann.parquet")
    assert set(own.load(tmp_path / "tables").remarks) >= set(lines)
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0),
        b"IDAT": zlib.compress(bytes(4 * 31)),
        b"IEND": b"",
    }
    chunks = [(len(data), name + data, zlib.crc32(name + data)) for name, data in parts.items()]
    content = b"".join(struct.pack(">I", n) + data + struct.pack(">I", crc) for n, data, crc in chunks)
    (tmp_path / "raw/ann/cat/3.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    message = (
        r"3\.png: an image of 16 bits with colors or transparency, which would be cut to 8; save it with 8 bits, or"
    )
    with pytest.raises(InputError, match=message):
        own.load(tmp_path / "raw")


def test_folders_without_an_image_are_refused_by_what_they_hold(tmp_path: Path) -> None:
    (tmp_path / "ann" / "cat").mkdir(parents=True)
    with pytest.raises(InputError, match=r"no image: expected CLIENT/CLASS/name with \.png, .*, got empty folders"):
        own.load(tmp_path)
    (tmp_path / "ann" / "cat" / "0.wav").touch()
    with pytest.raises(InputError, match=r"no image: .*, got 1 file: \.wav; give other data as CLIENT\.npz"):
        own.load(tmp_path)


@pytest.mark.parametrize(
    ("mode", "size", "message"),
    [
        ("RGB", (4, 4), "bob/dog/1.png: images of different sizes: expected 5 × 4 pixels, as .*cat/1.png, got 4 × 4"),
        ("L", (5, 4), "bob/dog/1.png: grey and colored images: expected mode RGB, as .*ann/cat/1.png, got mode L"),
    ],
)
def test_images_unlike_the_first(tmp_path: Path, mode: str, size: tuple[int, int], message: str) -> None:
    draw(tmp_path / "ann" / "cat" / "1.png")
    draw(tmp_path / "bob" / "dog" / "1.png", mode, size)
    with pytest.raises(InputError, match=message):
        own.load(tmp_path)


@pytest.mark.parametrize(
    ("first", "second", "classes"),
    [
        ([1, 2], [3, 1], ["1", "2", "3"]),
        ([[0], [1]], [[2.0], [1.0]], None),
        (["dog", "cat"], ["emu", "cat"], ["cat", "dog", "emu"]),
        ([b"dog", b"cat"], ["emu", "cat"], ["cat", "dog", "emu"]),
        ([-1, 1], [1, 7], ["-1", "1", "7"]),
        ([2**53, 2**53 + 1], [2**53 + 2, 2**53], [str(2**53 + k) for k in range(3)]),
    ],
)
def test_labels_of_arrays_are_classes_by_their_values(
    tmp_path: Path, first: list, second: list, classes: list[str] | None
) -> None:
    for name, y in (("a", first), ("b", second)):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((2, 3)), y=np.array(y))
    dataset = own.load(tmp_path)
    texts = [word.decode() if isinstance(word, bytes) else str(word) for word in np.ravel(first).tolist() + second]
    names = classes or ["0", "1", "2"]
    assert (dataset.num_classes, dataset.source.get("classes")) == (3, classes)
    assert dataset.remarks == (f"target 'y': 3 classes: {', '.join(names)}",)
    assert dataset.y.tolist() == ([0, 1, 2, 1] if classes is None else [names.index(text) for text in texts])
    words = object if isinstance(first[0], str) else None  # as pandas has them
    arrays = {name: (np.zeros((2, 3)), np.array(y, words)) for name, y in (("a", first), ("b", second))}
    hpcfed.write_federation(tmp_path / "arrays.h5", arrays)
    singles = {name: list(zip(x, y, strict=True)) for name, (x, y) in arrays.items()}
    hpcfed.write_federation(tmp_path / "singles.h5", singles)
    for path in (tmp_path / "arrays.h5", tmp_path / "singles.h5"):
        with Federation.open(path) as federation:
            assert (federation.num_classes, federation.source.get("classes")) == (3, classes)
            assert np.concatenate([federation.client(k)[1] for k in (0, 1)]).tolist() == dataset.y.tolist()


@pytest.mark.parametrize(
    ("labels", "positive", "names", "numbers"),
    [
        (["ill", "well", "ill"], "ill", ["well", "ill"], [1, 0, 1]),
        (["ill", "well", "ill"], "well", ["ill", "well"], [0, 1, 0]),
        ([0, 1, 1], "0", ["1", "0"], [1, 0, 0]),
        ([0, 1, 1], "1", None, [0, 1, 1]),
        ([1.0, 2.0, 1.0], "1", ["2", "1"], [1, 0, 1]),
        ([False, True, True], "0", ["True", "False"], [1, 0, 0]),
        ([False, True, True], "False", ["True", "False"], [1, 0, 0]),
    ],
)
def test_the_positive_class_of_arrays(
    tmp_path: Path, labels: list, positive: str, names: list[str] | None, numbers: list[int]
) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((3, 1)), y=np.array(labels))
    np.savez(tmp_path / "test.npz", x=np.ones((1, 1)), y=np.array(labels[:1]))
    dataset = own.load(tmp_path, positive=positive)
    assert (dataset.y.tolist(), dataset.source.get("classes")) == (numbers, names)
    assert dataset.test_y is not None
    assert dataset.test_y.tolist() == numbers[:1]
    said = (names or ["0", "1"])[1]
    assert dataset.remarks == (f"target 'y': 2 classes: {', '.join(names or ['0', '1'])}; positive: {said}",)


def test_the_positive_class_of_images(tmp_path: Path) -> None:
    for name, value in (("ill", 7), ("well", 9)):
        folder = tmp_path / "a" / name
        folder.mkdir(parents=True)
        Image.fromarray(np.full((2, 2), value, np.uint8)).save(folder / "0.png")
    for positive, names in ((None, ["ill", "well"]), ("ill", ["well", "ill"])):
        dataset = own.load(tmp_path, positive=positive)
        assert dataset.source["classes"] == names
        assert {names[label]: int(x[0, 0, 0]) for x, label in zip(dataset.x, dataset.y.tolist(), strict=True)} == {
            "ill": 7, "well": 9
        }  # fmt: skip
    for task in ("regression", "multi-label", "survival"):
        with pytest.raises(InputError, match=f"--task {task} has no effect with folders of images by class; give arr"):
            own.load(tmp_path, task=task)


def test_labels_of_arrays_that_need_a_look(tmp_path: Path) -> None:
    """NaN is a missing label, names may differ in case alone, and images may have their channels last."""
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros((3, 8, 8, 3), np.uint8), y=np.array(["a", "A", "b"]))
    assert [remark[:16] for remark in own.load(tmp_path).remarks[1:]] == ["classes 'A' and ", "channels last? h"]
    with pytest.warns(UserWarning, match=r"channels last\? hpcfed expects \(N, C, H, W\), and x is \(3, 8, 8, 3\)"):
        hpcfed.write_federation(tmp_path / "f.h5", {"a": (np.zeros((3, 8, 8, 3), np.uint8), LABELS[:3])})
    np.savez(path, x=np.zeros((3, 1, 8, 3)), y=np.array([3, np.nan, 1]))
    dataset = own.load(tmp_path, missing="drop")
    assert (dataset.y.tolist(), dataset.remarks) == ([1, 0], ("target 'y': 2 classes: 1, 3",))
    with pytest.raises(InputError, match="client 'a': y: expected a label for each sample, got 1 of NaN"):
        own.load(tmp_path)
    np.savez(path, x=np.zeros((2, 1)), y=np.array(["a", " "]))
    with pytest.raises(InputError, match=r"client 'a': y: a label is empty"):
        own.load(tmp_path)
    np.savez(path, x=np.arange(3)[:, None], y=np.array(["a", float("nan"), None], object).astype(str))
    assert "classes 'None', 'nan': if such labels are missing, leave their samples out" in own.load(tmp_path).remarks
    np.savez(path, x=np.zeros((2, 1)), y=np.array([0x110000, 97], np.uint32).view("<U1"))
    with pytest.raises(InputError, match=r"a.npz: .*got texts of characters that do not exist"):
        own.load(tmp_path)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.npz", "a.x.npy", "a/cat/1.png"])
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    """A link to nowhere is the user's mistake; a file that the machine fails to read (here: another memory) is not."""
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("nowhere")
    with pytest.raises(InputError, match=f"{name}: a link to a file that is not there"):
        own.load(tmp_path)
    path.unlink()
    path.symlink_to("/proc/self/mem")
    with pytest.raises(EnvironmentFailure, match=f"{name}: reading failed: got Input/output error"):
        own.load(tmp_path)


def test_mistakes_in_own_files(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    with pytest.raises(InputError, match="no such file or folder"):
        own.load(raw)
    raw.mkdir()
    with pytest.raises(InputError, match=r"no client's file is here: expected CLIENT.npz"):
        own.load(raw)
    (raw / "a.csv").write_text("u,v,y\n1,2,0\n1,x,1\n")
    for text, options, message in (
        ("u,v,y\n1,2,0\n1,2\n", {}, r"a.csv: row 3: cells: expected 3 columns, as in the header, got 2"),
        ("u,u,y\n1,2,0\n", {}, r"a.csv: the header has 'u' 2 times: expected a first line of different names"),
        ("", {}, r"a.csv: no header"),
        ("u,v,y\n1,2,0\n", {"target": "z"}, r"no column 'z'"),
        ("patient_id,time,y\n1,2,0\n", {"target": "weight"}, r"no column 'weight'; columns: patient_id, time, y"),
        ('u,"v\n1",y\n1,2,0\n', {}, r"the header has a line break in quotes: got u,\"v; write each name in one line"),
        ("y\n1\n", {}, r"no column is left for x"),
    ):
        (raw / "a.csv").write_text(text)
        with pytest.raises(InputError, match=message):
            own.load(raw, **options)
    (raw / "b.npz").write_bytes(b"")
    with pytest.raises(InputError, match=r"files of several kinds: got \.csv, \.npz"):
        own.load(raw)
    (raw / "b.npz").unlink()
    for name in ("Test", "TEST"):
        (raw / f"{name}.csv").write_text("u,v,y\n1,2,0\n")
        with pytest.raises(
            InputError, match=f"raw: '{name}': a client, or the test set\\?; name the test set 'test', or"
        ):
            own.load(raw)
        (raw / f"{name}.csv").unlink()
    with pytest.raises(InputError, match="by --client, or deal its rows to clients by --partition"):
        own.load(raw / "a.csv")


def test_arrays_that_lie_or_hold_objects(tmp_path: Path) -> None:
    """A pickle would run code when loaded; a header may claim what the file does not hold."""
    path = tmp_path / "a.npz"
    np.savez(path, x=np.array([{}], dtype=object), y=np.zeros(1))
    with pytest.raises(InputError, match=r"an array of Python objects.*astype"):
        own.load(tmp_path)
    np.savez(path, x=np.zeros((4, 3)), z=np.zeros(4))
    with pytest.raises(InputError, match="arrays are missing: expected 'x' and 'y', got x, z"):
        own.load(tmp_path)
    np.savez(tmp_path / "whole.npz", x=np.zeros((4, 3)), y=np.zeros(4))
    with zipfile.ZipFile(tmp_path / "whole.npz") as whole, zipfile.ZipFile(path, "w") as lying:
        for name in ("x.npy", "y.npy"):
            lying.writestr(name, whole.read(name).replace(b"(4, 3), ", b"(1152921504606846976, 3), ").ljust(200))
    (tmp_path / "whole.npz").unlink()
    with pytest.raises(InputError, match=r"a.npz: damaged, or no plain arrays"):
        own.load(tmp_path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as packed:
        packed.writestr("x.npy", bytes(range(256)) * 8)
        packed.writestr("y.npy", b"")
    path.write_bytes(path.read_bytes().replace(b"]\0\0", b"\xff\0\0", 1))  # the properties of its LZMA stream
    with pytest.raises(InputError, match=r"a.npz: damaged, or no plain arrays"):
        own.load(tmp_path)
    path.unlink()
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(InputError, match=r"a.csv: a pipe"):
        own.load(tmp_path)
    (tmp_path / "a.csv").unlink()
    path.write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(InputError, match=r"a.npz: damaged"):
        own.load(tmp_path)
    path.unlink()
    np.save(tmp_path / "a.y.npy", np.zeros(4))
    np.save(tmp_path / "a.x.npy", np.zeros((4, 3)))
    whole_x = (tmp_path / "a.x.npy").read_bytes()
    with zipfile.ZipFile(path, "w") as twice:
        for name in ("x.npy", "in/x.npy", "y.npy"):
            twice.writestr(name, whole_x)
    with pytest.raises(InputError, match=r"a.npz: damaged, or no plain arrays: got two arrays 'x'"):
        own_arrays.read_npz(path)
    path.unlink()
    for shape in (b"(9" + b"9" * 30 + b",)", b"(-4, 3)", b"(True, 12)", b"-" * 9000):
        damaged = whole_x.replace(b"(4, 3), }", (shape + b", }").ljust(9)).ljust(200)
        header = damaged[10:].partition(b"\n")[0] + b"\n"
        (tmp_path / "a.x.npy").write_bytes(damaged[:8] + len(header).to_bytes(2, "little") + damaged[10:])
        with pytest.raises(InputError, match=r"a.x.npy: damaged, or no plain arrays"):
            own.load(tmp_path)


def test_pictures_that_a_program_would_draw_are_refused(tmp_path: Path) -> None:
    """Pillow starts Ghostscript for PostScript, whatever a file's name is, and raises all kinds of errors at GIF."""
    (tmp_path / "a" / "cat").mkdir(parents=True)
    drawn = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 4\n%%EndComments\n"
    (tmp_path / "a" / "cat" / "1.png").write_bytes(drawn)
    with pytest.raises(InputError, match=r"1.png: no image of pixels: expected PNG, JPEG or BMP, got EPS"):
        own.load(tmp_path)


def test_files_with_names_that_are_not_utf_8(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.csv").write_text("x,y\n1,0\n2,1\n")
    try:
        (raw / "a.csv").rename(os.fsdecode(os.fsencode(raw) + b"/\xff.csv"))
    except OSError:  # a file system of UTF-8 alone
        return
    assert own.load(raw).clients == ["\udcff"]


def test_a_client_of_missing_values_and_data_of_one_class_are_refused(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "east.csv").write_text("age,dose,y\n1,2,a\n2,3,b\n")
    (raw / "west.csv").write_text("age,dose,y\n,?,a\nNA,,b\n")
    dataset = own.load(raw, missing="mean")
    done = split(dataset, None, None, 0, {})
    with pytest.raises(InputError, match=r"client 'west' has only missing values: got 2 rows; leave it out"):
        finish(dataset, done, "none")
    (raw / "west.csv").write_text("age,dose,y\n3,4,a\n")
    (raw / "east.csv").write_text("age,dose,y\n1,2,a\n")
    with pytest.raises(InputError, match=r"raw: all samples are of one class"):
        own.load(raw)
    for name in ("west", "east"):
        (raw / f"{name}.csv").write_text("age,dose,died\n3,4,0\n5,1,0\n")
    with pytest.raises(InputError, match=r"raw: all samples are of one class"):
        own.load(raw, task="multi-label", target="died")
    with pytest.raises(InputError, match=r"raw: no sample has an event"):
        own.load(raw, task="survival", target="died,age")


def test_a_client_without_labels_is_not_advised_to_fill_them(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "east.csv").write_text("age,who,y\n1,p,a\n2,q,b\n")
    fill = "; leave it out by --min-samples 1, or fill by --missing mean or median$"

    def refused(message: str, path: Path, **options: str) -> None:
        dataset = own.load(path, **options)
        with pytest.raises(InputError, match=message):
            finish(dataset, split(dataset, None, None, 0, {}), "none")

    alone = "no row to train on; leave it out by --min-samples 1$"
    (raw / "west.csv").write_text("age,who,y\n,p,\n7,q,\n")
    for missing in ("median", "drop"):
        refused(f"client 'west': no row has a label: got {alone}", raw, missing=missing)
        refused(f"client 'west': no row has a label and a group: got {alone}", raw, missing=missing, group="who")
    (raw / "west.csv").write_text("age,who,y\n7,q,\n,p,a\n")
    refused(f"client 'west': every row lacks a value: got no row to train on{fill}", raw, missing="drop")
    for cells, message in (
        ("7,,w", f"no row has a label: got {alone}"),
        (",a,w", f"every row lacks a value: .*{fill}"),
    ):
        (tmp_path / "all.csv").write_text(f"age,y,site\n1,a,e\n2,b,e\n{cells}\n")
        refused(f"client 'w': {message}", tmp_path / "all.csv", client_column="site", missing="drop")
    nan = float("nan")
    arrays = tmp_path / "arrays"
    arrays.mkdir()
    np.savez(arrays / "a.npz", x=np.ones((2, 1)), y=np.array([0.5, 1.5]))
    for x, y, message in ((1.0, nan, f"no row has a target: got {alone}"), (nan, 1.0, f"every row lacks a .*{fill}")):
        np.savez(arrays / "b.npz", x=np.full((2, 1), x), y=np.full(2, y))
        refused(f"client 'b': {message}", arrays, task="regression", missing="drop")


def test_survival_needs_an_event_and_a_time(tmp_path: Path) -> None:
    x = np.ones((2, 3))
    order, coding = "name the columns event,time in this order", "write 1 for an event or 0 for a censored time"
    for y, says in (
        ([[1, 4], [0, -1]], "got time -1"),
        ([[2, 4], [1, 5]], f"got event 2; {coding}"),
        ([[4, 1], [5, 0]], f"got event 4; {order}"),
        ([[1], [0]], f"shape .*{order}"),
    ):
        with pytest.raises(InputError, match=says):
            hpcfed.write_federation(tmp_path / "s.h5", {"a": (x, np.array(y, float))}, task="survival")
    hpcfed.write_federation(tmp_path / "s.h5", {"a": (x, np.array([[1, 4.0], [0, 0]]))}, task="survival")
    with Federation.open(tmp_path / "s.h5") as federation:
        assert (federation.task, federation.num_classes, federation.target_shape) == ("survival", None, (2,))


@pytest.mark.parametrize(
    ("dtype", "shape", "lines"),
    [
        (
            "int16",
            (1, 8),
            ["x in the file: from -30,000 to 32,000\n", "not scaled: channel 0 (", "scale by --standardize"],
        ),
        ("int32", (3,), ["not scaled: feature 0 (1e+03 ± 3.1e+04), feature 1 (", "feature 2 ("]),
        ("int64", (2,), ["x: whole numbers are rounded to float32, 33554433 to 33554432\n"]),
        ("uint64", (2,), [f"x: whole numbers are rounded to float32, {2**60 + 1} to {2**60}\n"]),
        ("uint8", (1, 2, 2), ["x in the file: from 0 to 200, which runs divide by 255\n"]),
        ("float32", (4,), ["x in the file: from 0 to 3\n"]),
    ],
)
def test_the_range_of_arrays_is_reported(tmp_path, command, dtype, shape, lines):
    """Bytes are divided by 255 in runs, other whole numbers are not scaled: a line says so."""
    ranges = {
        "int16": (-30000, 32000),
        "int32": (-30000, 32000),
        "int64": (0, 2**25 + 1),
        "uint64": (0, 2**60 + 1),
        "uint8": (0, 200),
    }
    low, high = ranges.get(dtype, (0, 1))
    (tmp_path / "raw").mkdir()
    for name in NAMES[:2]:
        x = np.full((6, *shape), low, dtype)
        x[3:] = high
        np.savez(tmp_path / f"raw/{name}.npz", x=x, y=np.arange(6) % 2)
    np.savez(tmp_path / "raw/test.npz", x=np.full((1, *shape), 3 if dtype == "float32" else high, dtype), y=[0])
    done = command(["prepare", "own", "--raw", "raw", "-o", "f.h5"], tmp_path)
    assert done.returncode == 0, done.stderr
    for line in lines:
        assert line in done.stdout
    assert ("not scaled" in done.stdout) == (dtype not in ("uint8", "float32"))


@pytest.mark.parametrize(("x", "y"), [((4, 0), (4,)), ((4, 3), (4, 0)), ((4, 1, 0, 5), (4,))])
def test_samples_without_numbers_are_refused(tmp_path, x, y):
    task = "classification" if len(y) == 1 else "regression"
    with pytest.raises(InputError, match=r"client 'a': [xy]: expected numbers of each sample, got shape \(4, "):
        hpcfed.write_federation(tmp_path / "f.h5", {"a": (np.zeros(x), np.zeros(y))}, task=task)
    assert list(tmp_path.iterdir()) == []
