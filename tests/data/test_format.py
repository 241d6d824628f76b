"""`Federation`: files other programs write by the contract, and every file it must refuse in one line."""

from __future__ import annotations

import gc
import json
import os
import resource
import struct
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcfed.data import federation as federation_format
from hpcfed.data.federation import MEMBERS, Federation, Standardization
from hpcfed.data.storage import ACCESS
from hpcfed.errors import EnvironmentFailure, InputError
from tests.launch import launch

X = np.arange(10 * 3 * 2 * 2, dtype=np.uint8).reshape(10, 3, 2, 2)
Y = np.array([0, 1, 2, 3, 0, 1, 2, 3, 0, 1])
OFFSETS = np.array([0, 4, 4, 10])


def write_minimal(path: Path, x: np.ndarray = X, y: np.ndarray = Y, **options: object) -> Path:
    """Write a federation of three clients, the second of them empty, with nothing optional in it."""
    with h5py.File(path, "w") as file:
        file.attrs.update({"format": "hpcfed-federation", "version": 1, "task": "classification", "num_classes": 4})
        file.create_dataset("train/x", data=x, **options)
        file.create_dataset("train/y", data=y, **options)
        file["train/offsets"] = OFFSETS
    return path


def test_nothing_optional_is_needed(tmp_path: Path) -> None:
    with Federation.open(str(write_minimal(tmp_path / "plain.h5"))) as federation:
        assert (federation.name, federation.content) == ("plain", "")
        assert (federation.partition, federation.source) == ({}, {})
        assert federation.vocabulary is federation.normalization is federation.test_offsets is None
        assert federation.sizes.tolist() == [4, 0, 6]
        assert federation.client_name(2) == "2"
        assert federation.client(1)[0].shape == (0, 3, 2, 2)
        assert [array.shape for array in federation.test(0, 5)] == [(0, 3, 2, 2), (0,)]
        x, y = federation.client(2)
        assert np.array_equal(x, X[4:])
        assert np.array_equal(y, Y[4:])


def test_views_are_read_only_and_outlive_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcfed.data.storage.NEIGHBOURHOOD", 0)  # else so few rows are read
    federation = Federation.open(write_minimal(tmp_path / "f.h5"))
    x, _ = federation.client(0)
    federation.close()
    assert np.array_equal(x, X[:4])
    assert not x.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 0


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(">f4", {}), ("<f8", {}), ("u1", {"chunks": True}), ("<f4", {"compression": "gzip"}), (">i2", {"chunks": True})],
)
def test_layouts_of_other_programs(tmp_path: Path, dtype: str, options: dict) -> None:
    path = write_minimal(tmp_path / "f.h5", X.astype(dtype), Y.astype(">i4"), **options)
    with Federation.open(path) as federation:
        x, y = federation.client(2)
        assert np.array_equal(x, X[4:].astype(dtype))
        assert np.array_equal(y, Y[4:])
        assert x.dtype == federation.x_dtype
        assert y.dtype == federation.y_dtype == np.int32
        assert x.dtype.isnative


def test_text_as_other_programs_store_it(tmp_path: Path) -> None:
    with h5py.File(write_minimal(tmp_path / "f.h5"), "r+") as file:
        file.attrs["format"] = np.bytes_(b"hpcfed-federation")
        file.attrs["name"] = "écoles"
        file.attrs["vocabulary"] = json.dumps(["a", "b"])
        file.attrs["partition"] = np.bytes_(json.dumps({"scheme": "natural"}))
        file.attrs["normalization"] = json.dumps({"mean": [0.1, 0.2, 0.3], "std": [1, 2, 3]})
        file["train/client"] = np.array([name.encode() for name in ("Zoë", "b", "")], h5py.string_dtype("utf-8", 8))
    with Federation.open(tmp_path / "f.h5") as federation:
        assert federation.name == "écoles"
        assert [federation.client_name(k) for k in range(3)] == ["Zoë", "b", ""]
        assert federation.partition == {"scheme": "natural"}
        assert federation.vocabulary == ["a", "b"]
        assert federation.normalization == Standardization((0.1, 0.2, 0.3), (1.0, 2.0, 3.0))


def test_a_client_by_number_and_by_name_which_comes_first(tmp_path: Path) -> None:
    with h5py.File(write_minimal(tmp_path / "f.h5"), "r+") as file:
        file["train/client"] = np.array([b"1", b"b", b"3"])
    with Federation.open(tmp_path / "f.h5") as federation:
        assert [federation.client_number(client) for client in (1, "1", "b", "2", "3")] == [1, 0, 1, 2, 2]
        for client in (3, "4", "x", "-1", "²"):
            with pytest.raises(InputError, match="expected a name of the federation, or a number below 3"):
                federation.client_number(client)
    with h5py.File(tmp_path / "f.h5", "r+") as file:
        file["train/client"][...] = [b"x", b"b", b"x"]
    says = r"f\.h5: several clients are named 'x': got 0, 2; name the client by its number"
    with Federation.open(tmp_path / "f.h5") as federation, pytest.raises(InputError, match=says):
        federation.client_number("x")


def test_regression_and_per_client_test_sets(tmp_path: Path) -> None:
    path = write_minimal(tmp_path / "f.h5", X, np.linspace(-1, 1, 20).reshape(10, 2))
    with h5py.File(path, "r+") as file:
        file.attrs["task"] = "regression"
        del file.attrs["num_classes"]
        file["test/x"], file["test/y"], file["test/offsets"] = X[:5], np.zeros((5, 2)), [0, 2, 5, 5]
    with Federation.open(path) as federation:
        assert (federation.num_classes, federation.target_shape, federation.num_test) == (None, (2,), 5)
        assert federation.test_offsets.tolist() == [0, 2, 5, 5]


def replace(name: str, value: object) -> Callable[[h5py.File], None]:
    """Return a change of one dataset or, where the name starts with @, of one attribute; None deletes."""

    def change(file: h5py.File) -> None:
        target, key = (file.attrs, name[1:]) if name.startswith("@") else (file, name)
        if key in target:
            del target[key]
        if value is not None:
            target[key] = value

    return change


def float_labels(file: h5py.File) -> None:
    replace("train/y", Y.astype(float))(file)


def half_a_test_set(file: h5py.File) -> None:
    file["test/x"] = X


def other_test_shape(file: h5py.File) -> None:
    file["test/x"], file["test/y"] = X[:, :1], Y


def other_test_labels(file: h5py.File) -> None:
    file["test/x"], file["test/y"] = X, Y + 1


def float_test_labels(file: h5py.File) -> None:
    file["test/x"], file["test/y"] = X, Y.astype(float)


def no_times(file: h5py.File) -> None:
    file.attrs["task"] = "survival"
    del file.attrs["num_classes"]


def float_tokens(file: h5py.File) -> None:
    file.attrs["task"] = "next-token"
    replace("train/x", X.astype(float))(file)


def short_test_offsets(file: h5py.File) -> None:
    file["test/x"], file["test/y"], file["test/offsets"] = X, Y, [0, 10]


WRONG: dict[str, tuple[Callable[[h5py.File], None], str]] = {
    "no format": (replace("@format", None), "not a federation file"),
    "other format": (replace("@format", "leaf"), "not a federation file"),
    "version": (replace("@version", 2), "another version: expected version 1, got 2"),
    "no version": (replace("@version", None), "expected version 1, got none"),
    "version as text": (replace("@version", "1"), "attribute 'version': expected one integer"),
    "task": (replace("@task", "clasification"), "did you mean 'classification'"),
    "no task": (replace("@task", None), "attribute 'task'"),
    "no num_classes": (replace("@num_classes", None), "attribute 'num_classes' is missing"),
    "num_classes 0": (replace("@num_classes", 0), "expected 1 … 1,048,576, got 0"),
    "partition": (replace("@partition", "iid"), "attribute 'partition': expected JSON, got 'iid'"),
    "source": (replace("@source", "[1]"), "attribute 'source': expected a JSON object"),
    "normalization keys": (replace("@normalization", '{"mean": [0]}'), "attribute 'normalization': expected"),
    "normalization length": (replace("@normalization", '{"mean": [0, 0], "std": [1, 1]}'), "expected 1 or 3, got 2"),
    "std 0": (replace("@normalization", '{"mean": [0], "std": [0]}'), "positive stds"),
    "no x": (replace("train/x", None), "dataset /train/x is missing"),
    "no y": (replace("train/y", None), "dataset /train/y is missing"),
    "no offsets": (replace("train/offsets", None), "dataset /train/offsets is missing"),
    "text for x": (replace("train/x", "no numbers"), "dataset /train/x: expected an array of numbers"),
    "lengths": (replace("train/y", Y[:9]), "differ in length: got 10 and 9 rows"),
    "offsets start": (replace("train/offsets", [1, 4, 10]), "does not cover the samples: expected 0 … 10, got 1 … 10"),
    "offsets end": (replace("train/offsets", [0, 4, 11]), "expected 0 … 10, got 0 … 11"),
    "offsets order": (replace("train/offsets", [0, 6, 4, 10]), "decreases at client 1: got 6 then 4"),
    "offsets type": (replace("train/offsets", [0.0, 10.0]), "expected one row of integers"),
    "no clients": (replace("train/offsets", [0]), "a federation of no clients"),
    "label too large": (replace("train/y", Y + 1), "labels in /train/y: expected 0 … 3, got 1 … 4"),
    "label negative": (replace("train/y", Y - 1), "labels in /train/y: expected 0 … 3, got -1 … 2"),
    "labels in rows": (replace("train/y", np.stack([Y, Y], 1)), "expected one label per sample"),
    "float labels": (float_labels, "expected integer labels"),
    "test label too large": (other_test_labels, "labels in /test/y: expected 0 … 3, got 1 … 4"),
    "float test labels": (float_test_labels, "expected integer labels"),
    "no times": (no_times, "/train/y: expected event and time, got shape () each"),
    "float tokens": (float_tokens, "expected integer tokens, got floating point"),
    "half a test set": (half_a_test_set, "dataset /test/y is missing"),
    "test shape": (other_test_shape, "a test sample has another shape"),
    "samples of nothing": (
        replace("train/x", X[:, :0]),
        "at least one number a sample, got (10, 0, 2, 2) and (10,)",
    ),
    "text for a version": (replace("@version", "1"), "attribute 'version': expected one integer, got '1'"),
    "test offsets": (short_test_offsets, "/test/offsets: expected 4 entries, got 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files(tmp_path: Path, case: str) -> None:
    change, message = WRONG[case]
    path = write_minimal(tmp_path / "wrong.h5")
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(InputError) as caught:
        Federation.open(path)
    line = str(caught.value)
    assert message in line
    assert line.startswith(f"{path}: ")
    assert "\n" not in line


def external(name: str) -> Callable[[h5py.File], None]:
    return replace(name, h5py.ExternalLink("other.h5", name))


def soft_to_external(file: h5py.File) -> None:
    file["elsewhere"] = h5py.ExternalLink("other.h5", "train")
    del file["train"]
    file["train"] = h5py.SoftLink("/elsewhere")


def circle(file: h5py.File) -> None:
    replace("train/y", h5py.SoftLink("/train/y"))(file)


def virtual(file: h5py.File) -> None:
    del file["train/x"]
    layout = h5py.VirtualLayout(X.shape, X.dtype)
    layout[:] = h5py.VirtualSource("other.h5", "train/x", X.shape)
    file.create_virtual_dataset("train/x", layout)


def raw_external(file: h5py.File) -> None:
    del file["train/client"]
    file.create_dataset("train/client", (3,), "S8", external=[("other.h5", 0, h5py.h5f.UNLIMITED)])


@pytest.mark.parametrize(
    "lead",
    [external("train"), *map(external, MEMBERS), soft_to_external, circle, virtual, raw_external],
    ids=["train", *MEMBERS, "soft", "circle", "virtual", "raw"],
)
def test_what_lies_in_another_file_is_refused_unopened(tmp_path: Path, lead: Callable[[h5py.File], None]) -> None:
    """The other is a pipe without a writer: opening it waits for ever."""
    path = write_minimal(tmp_path / "f.h5")
    os.mkfifo(tmp_path / "other.h5")
    with h5py.File(path, "r+") as file:
        file["train/client"], file["train/row"] = np.bytes_(["a", "b", "c"]), np.arange(10)
        file["test/x"], file["test/y"], file["test/offsets"] = X, Y, OFFSETS
        lead(file)
    with pytest.raises(InputError, match=r"f.h5: dataset /t\w+/\w+ (is a link to another|lies in another|is a circle)"):
        Federation.open(path)


def test_a_heap_that_the_library_would_walk_for_ever_is_found_beside_packed_samples(tmp_path: Path) -> None:
    """Of a file with 17 MB of chunks, all that is no chunk is searched."""
    path = tmp_path / "packed.h5"
    with h5py.File(path, "w") as file:
        file.attrs["format"], file.attrs["version"], file.attrs["num_classes"] = "hpcfed-federation", 1, 2
        file.attrs["task"] = "classification"  # a text of variable length, which lies in a heap
        file.create_dataset("train/x", data=np.zeros((68_000, 64), np.float32), chunks=(1000, 64))
        file["train/y"], file["train/offsets"] = np.zeros(68_000, np.int64), [0, 68_000]
    content = bytearray(path.read_bytes())
    place = content.find(b"GCOL\x01") + 16
    while int.from_bytes(content[place : place + 2], "little"):  # an object, not the free space behind them
        place += 16 + -(-int.from_bytes(content[place + 8 : place + 16], "little") // 8) * 8
    content[place + 8 : place + 16] = bytes(8)  # free space of no bytes
    path.write_bytes(content)
    with pytest.raises(InputError, match="its texts cannot be read"):
        Federation.open(path)


def test_heaps_in_heaps_are_refused_rather_than_walked_for_hours(tmp_path: Path) -> None:
    """Each object of a heap holds a heap of all that follow."""
    path, count = write_minimal(tmp_path / "nested.h5"), 2000
    heaps = [struct.pack("<H6xQ8sQ", 1, 16, b"GCOL\x01", 32 * left - 16) for left in range(count, 0, -1)]
    with h5py.File(path, "r+") as file:
        file["nested"] = np.frombuffer(b"".join(heaps), np.uint8)
    with pytest.raises(InputError, match="its texts cannot be read"):
        Federation.open(path)


def test_links_within_the_file_are_followed(tmp_path: Path) -> None:
    with h5py.File(write_minimal(tmp_path / "f.h5"), "r+") as file:
        file.move("train", "kept/here")
        file["train"] = h5py.SoftLink("kept/./here")
        file["kept/here/client"] = h5py.SoftLink("../names")  # HDF5 has no "..": it leads nowhere
        file["test"] = h5py.SoftLink("/nowhere")
    with Federation.open(tmp_path / "f.h5") as federation:
        assert np.array_equal(federation.client(2)[0], X[4:])
        assert (federation.client_names(), federation.num_test) == (["0", "1", "2"], 0)


def test_not_a_file_of_ours(tmp_path: Path) -> None:
    (tmp_path / "text.h5").write_text("PK not HDF5 at all" * 100)
    (tmp_path / "empty.h5").write_bytes(b"")
    for name, message in (
        ("absent.h5", "no such federation file"),
        ("", "is a folder"),
        ("text.h5", "not an HDF5 file"),
        ("empty.h5", "not an HDF5 file"),
    ):
        with pytest.raises(InputError, match=message):
            Federation.open(tmp_path / name)


def test_a_file_that_this_process_has_open_with_locks(tmp_path: Path) -> None:
    path = write_minimal(tmp_path / "f.h5")
    said = r"f\.h5: open in this process already, with locks; close it, or open it with locking=False"
    with h5py.File(path), pytest.raises(InputError, match=said):
        Federation.open(path)
    with h5py.File(path, locking=False), Federation.open(path) as federation:
        assert federation.num_clients


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.99])
def test_truncated(tmp_path: Path, share: float) -> None:
    path = write_minimal(tmp_path / "f.h5")
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(InputError, match=r"truncated HDF5 file|not an HDF5 file, or damaged"):
        Federation.open(path)


def test_labels_that_another_rank_checks_are_not_read_at_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_minimal(tmp_path / "f.h5", X, Y)
    checked: list[str] = []
    monkeypatch.setattr(Federation, "_check_values", lambda self, targets, where: checked.append(where))
    with Federation.open(path, labels_checked=True) as federation:
        assert federation.train()[1].tolist() == Y.tolist()
        federation.client(0)
    assert not checked
    with Federation.open(path):
        assert "/train/y" in checked


def test_labels_of_large_files_are_checked_when_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation_format, "LABELS_CHECKED_AT_OPEN", 5)
    labels = Y.copy()
    labels[7] = 4
    with Federation.open(write_minimal(tmp_path / "f.h5", X, labels)) as federation:
        assert len(federation.client(0)[1]) == 4
        with pytest.raises(InputError, match=r"labels in /train/y of client 2: expected 0 … 3, got 0 … 4"):
            federation.client(2)


def test_opening_reads_no_samples(tmp_path: Path) -> None:
    """A sparse file of 64 GB opens as fast as a small one."""
    path = tmp_path / "large.h5"
    with h5py.File(path, "w") as file:
        file.attrs.update({"format": "hpcfed-federation", "version": 1, "task": "regression"})
        for name, shape in (("x", (1_000_000, 8_000)), ("y", (1_000_000,))):
            layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            space = h5py.h5s.create_simple(shape)
            h5py.h5d.create(file.require_group("train").id, name.encode(), h5py.h5t.IEEE_F64LE, space, layout)
        file["train/offsets"] = [0, 999_990, 1_000_000]
    assert path.stat().st_size > 64e9
    with Federation.open(path) as federation:
        assert federation.client(1)[0].shape == (10, 8_000)


@pytest.mark.parametrize("access", ACCESS)
def test_every_way_of_reading_gives_the_same(tmp_path: Path, access: str) -> None:
    path = write_minimal(tmp_path / "f.h5")
    with Federation.open(path, access) as federation:
        assert [array.tolist() for array in federation.client(2)] == [X[4:].tolist(), Y[4:].tolist()]
        assert np.array_equal(federation.train()[0], X)
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(EnvironmentFailure, match=r"f.h5: the data file became shorter: expected at least"):
            federation.client(2)


def test_files_open_once_whatever_the_number_of_clients(tmp_path: Path) -> None:
    def descriptors(num_clients: int) -> int:
        path = tmp_path / f"{num_clients}.h5"
        with h5py.File(write_minimal(path, X.astype("f4")), "r+") as file:
            del file["train/offsets"]
            file["train/offsets"] = np.r_[np.zeros(num_clients, int), 10]
        with Federation.open(path) as federation:
            federation.client(num_clients - 1)
            here = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
            return sum(path.samefile(link) for link in here if link.exists())

    assert descriptors(2) == descriptors(20_000) <= 3


def test_numbers_of_a_layout_that_numpy_has_not_are_converted(tmp_path: Path) -> None:
    """Twelve bits in sixteen: mapped as they lie they would be other numbers."""
    kind = h5py.h5t.STD_I16LE.copy()
    kind.set_precision(12)
    kind.set_offset(4)
    path = write_minimal(tmp_path / "f.h5")
    with h5py.File(path, "r+") as file:
        del file["train/x"]
        space = h5py.h5s.create_simple((10, 3))
        stored = h5py.h5d.create(file["train"].id, b"x", kind, space)
        stored.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(30, dtype="<i2").reshape(10, 3))
    with Federation.open(path) as federation:
        assert federation.client(0)[0].tolist() == np.arange(12).reshape(4, 3).tolist()


def test_a_machine_without_more_open_files_has_no_damaged_file(tmp_path: Path) -> None:
    """Opening takes several: whichever is refused, the file need not be prepared again."""
    path = write_minimal(tmp_path / "plain.h5")
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    gc.collect()  # or files of the tests before may be closed meanwhile
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        with suppress(OSError):
            while True:
                held.append(stack.enter_context(Path(os.devnull).open("rb")))
        for left in range(3):
            with pytest.raises(EnvironmentFailure, match=r"plain.h5: the system says: Too many open files; raise"):
                Federation.open(path)
            held[left].close()
    Federation.open(path)


def test_files_are_written_and_read_whatever_driver_the_environment_names(tmp_path: Path) -> None:
    """``split`` would write two files in the place of one; of one in memory, ``core``, there is no descriptor."""
    program = "import hpcfed; hpcfed.write_federation('f.h5', {'north': ([[1.0], [2.0]], [0, 1])}); "
    program += "from hpcfed.data.federation import Federation; Federation.open('f.h5')"
    done = launch(0, [], program=("-c", program), cwd=tmp_path, env={"HDF5_DRIVER": "split"})
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["f.h5"]
