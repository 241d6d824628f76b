"""`hpcfed prepare` and `hpcfed inspect` as a user types them."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.own import write_federation
from hpcfed.data.federation import Federation
from hpcfed.data.samples import text_of
from hpcfed.io.console import short_names
from tests.data.raw import write_idx_folder
from tests.launch import Completed

Command = Callable[..., Completed]
Hpcfed = Callable[..., str]
LONG = [f"university hospital of the north, ward {k}, northern wing" for k in range(3)]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def hpcfed(command: Command, tmp_path: Path) -> Hpcfed:
    """The command, which returns what it printed: stdout, or stderr if it should fail."""

    def call(*arguments: object, code: int = 0) -> str:
        ended = command(arguments, tmp_path)
        assert ended.returncode == code, ended.stderr + ended.stdout
        return ended.stdout if code == 0 else ended.stderr

    return call


def test_prepare_and_inspect_images(tmp_path: Path, hpcfed: Hpcfed) -> None:
    write_idx_folder(tmp_path / "raw", end=".gz")
    path, picture = tmp_path / "f.h5", tmp_path / "f.png"
    arguments = ("prepare", "fashion-mnist", "--raw", tmp_path / "raw", "--clients", 6, "-o", path)
    said = hpcfed(*arguments, "--partition", "dirichlet-client", "--alpha", 0.5, "--name", "tiny")
    with Federation.open(path) as federation:
        assert federation.name == "tiny"
        expected = {"scheme": "dirichlet-client", "clients": 6, "alpha": 0.5, "sizes": "equal", "seed": 0}
        assert federation.partition == expected
        assert federation.content in said
    assert "not the published files of Fashion-MNIST" in said
    shown = hpcfed("inspect", path, "--verify", "--picture", picture)
    for part in (
        "min 10, median 10, max 10",
        "dirichlet-client, clients 6, alpha 0.5",
        "verified",
        "Sites",
    ):
        assert part in shown
    assert "\x1b" not in shown
    assert picture.read_bytes().startswith(PNG)


def test_inspect_names_some_of_many_classes(tmp_path: Path, hpcfed: Hpcfed) -> None:
    """Of thousands each had a line."""
    (tmp_path / "raw").mkdir()
    for client in range(20):
        rows = "".join(f"0.5,class-{8 * client + k:03d}\n" for k in range(8))
        (tmp_path / f"raw/site-{client:02d}.csv").write_text(f"a,y\n{rows}")
    file = str(tmp_path / "many.h5")
    hpcfed("prepare", "own", "--raw", str(tmp_path / "raw"), "-o", file)
    lines = hpcfed("inspect", file).splitlines()
    of_classes = [" ".join(line.split()) for line in lines if line.startswith(" source classes")]
    assert of_classes[-2:] == ["source classes class-011", "source classes and 148 more"]
    assert len(of_classes) == 13
    assert "class-099 1 and 60 more" in " ".join(" ".join(lines).split())


@pytest.mark.soak
def test_prepare_and_inspect_a_regression_and_times(tmp_path: Path, hpcfed: Hpcfed) -> None:
    path, picture = tmp_path / "f.h5", tmp_path / "f.svg"
    hpcfed("prepare", "linear-regression", "-o", path)
    with Federation.open(path) as federation:
        assert federation.sizes.tolist() == [30] * 20
        assert federation.partition == {"scheme": "natural", "clients": 20}
        assert (federation.feature_shape, federation.target_shape) == ((1000,), (1,))
    shown = hpcfed("inspect", path, "--picture", picture)
    assert "min 30, median 30, max 30" in shown
    assert "classes" not in shown
    with Federation.open(path) as federation:
        for y in (federation.train()[1], federation.client(7)[1]):
            assert f"{y.astype(float).mean():.4g} ± {y.astype(float).std():.3g}" in shown
    assert "y, mean ± std: " in shown
    (tmp_path / "raw").mkdir()
    for name, times in (("US$_$", (1, 2, 9)), ("b", (4, 5))):
        rows = [f"{k},{k % 2},{time}" for k, time in enumerate(times)]
        (tmp_path / "raw" / f"{name}.csv").write_text("\n".join(["age,event,time", *rows]))
    hpcfed("prepare", "own", "--raw", tmp_path / "raw", "--task", "survival", "--target", "event,time", "-o",
           tmp_path / "s.h5")  # fmt: skip
    shown = [" ".join(line.split()) for line in hpcfed("inspect", tmp_path / "s.h5", "--picture", picture).splitlines()]
    assert {"target median observed time: 4", "US$_$ 3 67 % 33 % 2", "b 2 50 % 50 % 4.5"} <= {*shown}
    assert "<!-- US$_$ -->" in picture.read_text()  # a name, no mathematics


@pytest.mark.soak
def test_the_picture_shows_samples_as_text(tmp_path: Path, hpcfed: Hpcfed) -> None:
    """Two roles of different texts: each line of the picture is a role's first sample, in its vocabulary's letters."""
    text, letters = "to be or not to be", " benort"
    tokens = np.array([[letters.index(letter) for letter in text]])
    write_federation(
        tmp_path / "f.h5",
        {"HAMLET": (tokens, tokens[:, 0])},
        task="next-token",
        vocabulary=letters,
        source={"play": "Hamlet"},
    )
    hpcfed("inspect", tmp_path / "f.h5", "--picture", tmp_path / "f.svg")
    assert f"HAMLET: {text}" in (tmp_path / "f.svg").read_text()


@pytest.mark.parametrize(
    ("vocabulary", "tokens", "text"),
    [
        ("abc", [2, 0, 1], "cab"),
        (["to", "be"], [0, 1, 5], "to be \ufffd"),
        ({"to": 1, "be": 0}, [1, 0], "to be"),
    ],
)
def test_tokens_as_text(vocabulary: object, tokens: list[int], text: str) -> None:
    assert text_of(np.array(tokens), vocabulary) == text


def test_changed_data_are_noticed(tmp_path: Path, hpcfed: Hpcfed) -> None:
    path = tmp_path / "f.h5"
    hpcfed("prepare", "toy2d", "-o", path)
    with Federation.open(path) as federation:
        value = np.float64(federation.client(0)[0][0, 0]).tobytes()
    path.write_bytes(path.read_bytes().replace(value, np.float64(2.5).tobytes(), 1))
    assert "the data changed since the file was written" in hpcfed("inspect", path, "--verify", code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("prepare mnits -o OUT", "unknown source 'mnits'; did you mean 'mnist'?"),
        ("prepare mnist -o OUT", "mnist is read from files; name their folder by --raw"),
        ("prepare MNIST --raw . -o OUT", "missing train-images-idx3-ubyte[.gz], train-labels-idx1-ubyte[.gz]"),
        ("prepare toy2d --raw . -o OUT", "toy2d is not read from files"),
        ("prepare toy2d", "Missing option '-o'"),
        ("prepare toy2d --clients 3 -o OUT", "--clients: expected at most the 2 clients of toy2d, got 3"),
        ("prepare toy2d --partition dirichlet-class -o OUT", "dirichlet-class needs classes, and toy2d has none"),
        ("prepare toy2d --partition iid --clients 3 -o OUT", "more clients than samples"),
        ("prepare toy2d --partition idd -o OUT", "unknown partition 'idd'; did you mean 'iid'?"),
        ("prepare toy2d --partition dirichlet -o OUT", "did you mean 'dirichlet-class' or 'dirichlet-client'?"),
        ("prepare toy2d --standardize pooled --missing drop -o OUT", "--missing has no effect with toy2d"),
        ("prepare toy2d --standardize poled -o OUT", "did you mean 'pooled'?"),
        ("prepare linear-regression --partition iid --alpha 1 -o OUT", "--alpha has no effect with --partition iid"),
        ("prepare linear-regression --partition iid --sigma 1 -o OUT", "--sigma has no effect with --sizes equal"),
        ("prepare linear-regression --partition iid --clients 0 -o OUT", "0 is not in the range"),
        ("prepare toy2d --seed -1 -o OUT", "-1 is not in the range"),
        ("prepare own --raw absent --test-fraction 30 -o OUT", "'--test-fraction': 30.0 is not in the range 0<x<1"),
        ("inspect OUT", "no such federation file"),
        ("inspect . --picture p.gif", "expected .png, .pdf, .svg, got .gif"),
    ],
)
def test_mistakes_end_in_one_line(tmp_path: Path, command: Command, arguments: str, message: str) -> None:
    done = command(arguments.replace("OUT", "out.h5").split(), tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_the_machines_failure(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hpcfed.data.picture.write_whole", full)
    write_federation(tmp_path / "own.h5", {"a": (np.zeros((3, 2), np.float32), np.array([0, 1, 0]))})
    done = command(["inspect", "own.h5", "--picture", "own.png"], tmp_path)
    assert (done.returncode, done.stdout) == (4, "")
    assert "own.png: can't write the picture (No space left on device); choose another place\n" in done.stderr


def test_preparation_does_without_torch_and_mpi() -> None:
    listing = "import sys, hpcfed.cli.prepare, hpcfed.cli.inspect; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, timeout=60, check=True)
    assert not {"torch", "mpi4py.MPI", "matplotlib", "sklearn"} & set(ended.stdout.split())


def of_sites(tmp_path: Path, hpcfed: Hpcfed) -> tuple[Path, dict[str, np.ndarray]]:
    """A federation of three named sites, the last without class b and with another second feature."""
    rng = np.random.default_rng(0)
    raw = tmp_path / "raw"
    raw.mkdir()
    found = {}
    for site, count in (("Aachen", 40), ("Bern", 20), ("Chur", 12)):
        x = rng.normal(size=(count, 2)) * [1.0, 3.0] + [0.0, 20.0 if site == "Chur" else 10.0]
        labels = ["a"] * count if site == "Chur" else ["a", "b"] * (count // 2)
        rows = [f"{one:.6f},{two:.6f},{label}" for (one, two), label in zip(x, labels, strict=True)]
        (raw / f"{site}.csv").write_text("\n".join(["age,dose,outcome", *rows]) + "\n")
        found[site] = np.array([[float(cell) for cell in row.split(",")[:2]] for row in rows])
    hpcfed("prepare", "own", "--raw", raw, "--target", "outcome", "--standardize", "client", "-o", tmp_path / "own.h5")
    return tmp_path / "own.h5", found


def test_the_picture_shows_images_of_all_classes_by_name(tmp_path: Path, hpcfed: Hpcfed) -> None:
    """A folder of images is sorted by class: the first eight of a client would all be of the first one."""
    y = np.repeat(["cat", "dog", "US$_$"], 10)
    clients = {name: (np.zeros((30, 1, 4, 4), np.uint8), y) for name in ("north", "south")}
    write_federation(tmp_path / "f.h5", clients)
    hpcfed("inspect", tmp_path / "f.h5", "--picture", tmp_path / "f.svg")
    written = (tmp_path / "f.svg").read_text()
    assert [written.count(f"<!-- {name} -->") for name in ("cat", "dog", "US$_$")] == [1 + 2 * 3, 1 + 2 * 2, 1 + 2 * 3]
    assert "<!-- 30 -->" in written
    assert "<!-- 29.5" not in written  # the histogram of clients of one size


def test_sites_are_shown_by_name_with_their_labels_and_shifts(tmp_path: Path, hpcfed: Hpcfed) -> None:
    """The shifts are those of the files' own units, though each site is scaled by itself."""
    path, x = of_sites(tmp_path, hpcfed)
    said = hpcfed("inspect", path, "--picture", tmp_path / "own.png")
    table = [line.split() for line in said.split("Sites")[1].splitlines()[1:5]]
    assert [" ".join(row) for row in table] == [
        "client train a b", "Aachen 40 50 % 50 %", "Bern 20 50 % 50 %", "Chur 12 100 % –",
    ]  # fmt: skip
    assert "no training sample of b: Chur" in said
    header, first, _ = (line.split() for line in said.split("Standardised mean differences")[1].splitlines()[1:4])
    assert (header, first[0]) == (["feature", *x], "dose")
    for site, cell in zip(x, first[1:], strict=True):
        own, others = x[site][:, 1], np.concatenate([x[name][:, 1] for name in x if name != site])
        expected = (own.mean() - others.mean()) / np.sqrt((own.var() + others.var()) / 2)
        assert float(cell.replace("−", "-")) == pytest.approx(expected, abs=0.006)
    assert "from 0.8 large: 1 of 2 features" in said
    assert (tmp_path / "own.png").stat().st_size > 10_000


@pytest.mark.soak
def test_what_a_site_never_measured_is_named_and_in_no_difference(tmp_path: Path, hpcfed: Hpcfed) -> None:
    """Site a lacks lab and ward, b one cell of lab: both are filled from others, which makes sites look alike."""
    raw = tmp_path / "raw"
    raw.mkdir()
    cells = {"a": ["1,,", "3,,"], "b": ["5,7,icu", "7,,icu", "7,9,er"], "c": ["6,3,er", "5,5,icu"]}
    for site, rows in cells.items():
        lines = ["age,lab,ward,y", *(f"{row},{k % 2}" for k, row in enumerate(rows))]
        (raw / f"{site}.csv").write_text("\n".join(lines) + "\n")
    said = hpcfed("prepare", "own", "--raw", raw, "--missing", "mean", "-o", tmp_path / "own.h5")
    assert "lab: no value at a; ward: no value at a; filled by other clients' values\n" in said
    said = hpcfed("inspect", tmp_path / "own.h5")
    shares, shifts = (said.split(title)[1].splitlines() for title in ("Missing values", "mean differences"))
    assert [" ".join(line.split()) for line in shares[1:5]] == [
        "feature a b c", "lab 100 % 33 % –", "ward 100 % – –",
        "of a site's training samples; they have been filled",
    ]  # fmt: skip
    differences = {line.split()[0]: line.split()[1:] for line in shifts[2:6]}
    assert differences["lab"] == ["–", "+4.00", "−4.00"]  # 7 and 9 against 3 and 5, of variance 1 each
    assert differences["ward=er"] == ["–", "−0.34", "+0.34"]
    assert differences["age"][0] != "–"
    assert said.rstrip().endswith("filled cells are left out")


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["a", "b" * 24], ["a", "b" * 24]),
        (["north hospital of the city, ward 1", "b"], ["north hospi…city, ward 1", "b"]),
        (LONG, [f"university hospital o… {k}" for k in range(3)]),
    ],
)
def test_names_in_pictures_stay_different(names: list[str], shown: list[str]) -> None:
    assert short_names(names) == shown
    assert max(map(len, shown)) <= 24
