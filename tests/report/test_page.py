"""The report as files: figures, one page that needs nothing else, and what is never overwritten."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from hpcfed.cli.report import command
from hpcfed.errors import InputError
from hpcfed.report import make_report
from tests.report.conftest import make_rows, write_run

PNG = b"\x89PNG\r\n\x1a\n"


class Resources(HTMLParser):
    """Collect the tags of a page and everything it would load or link."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.targets: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.targets += [value for name, value in attrs if name in ("src", "srcset", "href", "data", "action")]


@pytest.fixture(scope="module")
def page_of_two_methods(tmp_path_factory):
    """The report of two seeds of FedAvg and of FedExP: (the page, the run folders)."""
    folder = tmp_path_factory.mktemp("two")
    runs = [
        write_run(folder / f"{method}-{seed}", method, seed, rows=make_rows(6, method, seed))
        for method in ("fedavg", "fedexp")
        for seed in range(2)
    ]
    return make_report(runs, folder / "report", [0.3]), runs


def test_page_of_several_runs_is_self_contained(page_of_two_methods):
    text = page_of_two_methods[0].read_text(encoding="utf-8")
    found = Resources(text)
    assert len(found.targets) == 2 * 7  # every figure for light and for dark screens
    assert all(target.startswith("data:image/png;base64,") for target in found.targets)
    assert not re.search(r"https?://|url\(|@import", text)
    assert "script" not in found.tags
    for fact in ("9d4f06ac6a3b1c55", "MPICH 4.3", "node-1", "2.13.0", "algorithm.name", "batch_size: 50"):
        assert fact in text


def test_figures_are_png_and_follow_what_was_recorded(page_of_two_methods):
    page, runs = page_of_two_methods
    figures = page.parent / "figures"
    names = {file.name for file in figures.iterdir()}
    assert names == {
        "test-accuracy-rounds.png",
        "test-accuracy-params.png",
        "test-loss-rounds.png",
        "test-loss-params.png",
        "local-loss-rounds.png",
        "server-lr-rounds.png",
        "seconds.png",
    }
    assert all((figures / name).read_bytes().startswith(PNG) for name in names)
    make_report(runs[:2], page.parent)  # FedAvg alone has no step size of its own
    assert {file.name for file in figures.iterdir()} == names - {"server-lr-rounds.png"}
    assert not list(page.parent.rglob(".*"))


def test_one_run_is_reported_in_its_own_folder(tmp_path):
    folder = write_run(tmp_path / "run", rows=make_rows(3, "fedexp", 0), status=None)
    assert make_report([folder]) == folder / "report.html"
    assert (folder / "figures" / "test-accuracy-rounds.png").exists()
    make_report([folder])
    (folder / "report.html").write_text("<html>mine</html>")
    with pytest.raises(InputError, match="not written by hpcfed report"):
        make_report([folder])
    assert (folder / "report.html").read_text() == "<html>mine</html>"


def test_a_run_of_a_single_round_without_any_measurement(tmp_path):
    rows = [dict.fromkeys(make_rows(1, "fedavg", 0)[0]) | {"round": 1}]
    page = make_report([write_run(tmp_path / "run", rows=rows)])
    assert "–" in page.read_text(encoding="utf-8")
    assert not list((page.parent / "figures").iterdir())


def test_folders_that_are_not_ours_are_left_alone(tmp_path):
    runs = [write_run(tmp_path / str(seed), seed=seed, rows=make_rows(3, "fedavg", seed)) for seed in range(2)]
    make_report([runs[0]])
    with pytest.raises(InputError, match="folder of a run"):
        make_report(runs, runs[0])
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.tex").write_text("text")
    with pytest.raises(InputError, match="no report of ours"):
        make_report(runs, other)
    with pytest.raises(InputError, match="not a folder"):
        make_report(runs, other / "chapter.tex")
    with pytest.raises(InputError, match="Not a directory"):
        make_report(runs, other / "chapter.tex" / "report")
    assert [file.name for file in other.iterdir()] == ["chapter.tex"]


def test_names_are_escaped(tmp_path):
    change = {"algorithm": {"factory": "<script>alert(1)</script>:$x_1$"}, "data": "a&b<i>.h5"}
    run = write_run(tmp_path / "run", rows=make_rows(3, "fedavg", 0), change=change)
    text = make_report([run]).read_text(encoding="utf-8")
    assert "script" not in Resources(text).tags
    assert "&lt;script&gt;alert(1)&lt;/script&gt;:$x_1$" in text
    assert "a&amp;b&lt;i&gt;.h5" in text


def test_reader_is_warned(tmp_path):
    folders = [
        write_run(tmp_path / "a", rows=make_rows(3, "fedavg", 0)),
        write_run(tmp_path / "b", rows=make_rows(2, "fedavg", 0), status=None),
        write_run(
            tmp_path / "c", "fedexp", rows=make_rows(2, "fedexp", 0), status="diverged", change={"data_content": "0"}
        ),
    ]
    text = make_report(folders, tmp_path / "report").read_text(encoding="utf-8")
    for warning in (
        "FedAvg: unfinished",
        "more than one run of seed 0",
        "FedExP: diverged",
        "not train on the same data",
    ):
        assert warning in text


@pytest.mark.parametrize("target", ["90", "0", "-1", "nan"])
def test_target_must_be_a_fraction(tmp_path, target):
    run = write_run(tmp_path / "run", rows=make_rows(3, "fedavg", 0))
    with pytest.raises(InputError, match="fraction above 0 and up to 1"):
        make_report([run], None, [float(target)])


def test_command_prints_the_tables_and_where_the_files_are(tmp_path):
    write_run(tmp_path / "fedexp", "fedexp", rows=make_rows(3, "fedexp", 0))
    arguments = [str(tmp_path), "--target", "0.9", "--window", "2", "--output", str(tmp_path / "report")]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "FedExP" in result.output
    assert "mean of 2 evaluations" in result.output
    assert str(tmp_path / "report" / "report.html") in result.output


def test_report_imports_neither_torch_nor_mpi():
    check = (
        "import sys, hpcfed.report, hpcfed.cli.report; print(sorted({'torch', 'mpi4py', 'h5py'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
