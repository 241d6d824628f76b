"""The report as files: figures, one page that needs nothing else, and what is never overwritten."""

from __future__ import annotations

import csv
import itertools
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from hpcfed.cli.report import MOST_ROWS, command, print_table
from hpcfed.errors import InputError
from hpcfed.io.figure_style import PAPER, blank, to_files, to_svg
from hpcfed.lab.report.comparison import compare
from hpcfed.lab.report.page import _title
from hpcfed.lab.report.plots import DISTINCT, Scene, SecondsPlot
from hpcfed.lab.report.sections import ACCURACY, LOSS, own_metrics
from hpcfed.lab.report.tables import Table
from tests.report.conftest import make_report, make_rows, write_clients, write_run

FILES = {
    *(
        f"test-{what}-{against}"
        for what in ("accuracy", "loss")
        for against in ("rounds", "params", "gradients", "seconds")
    ),
    *("local-loss-rounds", "server-lr-rounds", "difference-rounds", "test_f1-rounds", "clients", "seconds"),
}


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
    """The report of two seeds of FedAvg, with a metric of the user's, and of FedExP: (the page, the run folders)."""
    folder = tmp_path_factory.mktemp("two")
    own = {"fedavg": {"test_f1": 0.1, "train_f1": None}, "fedexp": {}}
    runs = [
        write_run(
            folder / f"{method}-{seed}", method, seed, rows=[row | own[method] for row in make_rows(6, method, seed)]
        )
        for method in own
        for seed in range(2)
    ]
    write_clients(runs[0], [0.5, 0.9, 0.7, 1.0])
    return make_report(runs, folder / "report", [0.3]), runs


def test_page_of_several_runs_is_self_contained(page_of_two_methods):
    text = page_of_two_methods[0].read_text(encoding="utf-8")
    found = Resources(text)
    assert found.tags.count("figure") == len(FILES)
    assert all(target.startswith(("#", "data:")) for target in found.targets)
    assert not re.search(r"https?://|url\((?!#)|@import", text)
    assert found.tags.count("script") == text.count('<script type="application/json">') + 1
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|<script [^>]*src", text)
    for fact in ("9d4f06ac6a3b1c55", "MPICH 4.3", "node-1", "2.13.0", "algorithm.name", "batch_size: 50"):
        assert fact in text


def test_figures_take_their_colours_from_the_page_and_share_no_identifier(page_of_two_methods):
    text = page_of_two_methods[0].read_text(encoding="utf-8")
    drawn = "".join(re.findall(r"<svg viewBox=.*?</svg>", text, flags=re.DOTALL))
    assert drawn.count("<text") > 50
    assert not re.findall(r"#[0-9a-f]{6}\b", drawn)
    identifiers = re.findall(r'\bid="([^"]+)"', text)
    assert len(identifiers) == len(set(identifiers))
    assert set(re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", text)) <= {
        pair for name in identifiers for pair in ((name, ""), ("", name))
    }


def test_figures_follow_what_was_recorded(page_of_two_methods, tmp_path):
    page, runs = page_of_two_methods
    folder = page.parent / "figures"
    assert {file.name for file in folder.iterdir()} == {f"{name}{kind}" for name in FILES for kind in (".png", ".pdf")}
    assert all(file.read_bytes().startswith((b"\x89PNG\r\n\x1a\n", b"%PDF")) for file in folder.iterdir())
    assert not list(page.parent.rglob(".*"))
    text = make_report(runs[2:], tmp_path / "fedexp", figures=False).read_text(encoding="utf-8")
    assert 'id="clients-' not in text  # only the first run measured them
    assert 'id="difference-rounds-' not in text  # a method alone
    assert [file.name for file in (tmp_path / "fedexp").iterdir()] == ["report.html"]


def test_every_table_is_there_as_csv_and_latex(page_of_two_methods):
    page, _ = page_of_two_methods
    folder = page.parent / "tables"
    found = {file.stem for file in folder.iterdir()}
    assert found >= {"results", "targets", "time", "recipes", "runs"}
    assert {file.name for file in folder.iterdir()} == {f"{name}{kind}" for name in found for kind in (".csv", ".tex")}
    results = [*csv.reader((folder / "results.csv").open(encoding="utf-8"))]
    assert results[0][:3] == ["Method", "Seeds", "Rounds"]
    latex = (folder / "results.tex").read_text(encoding="utf-8")
    assert latex.count(r"\\") == len(results)
    shown = re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))
    assert all(row[0] in shown for row in results)


@pytest.mark.soak
def test_figures_of_an_earlier_report_go(tmp_path):
    run = write_run(tmp_path / "run", rows=make_rows(2, "fedavg", 0))
    stale = run / "figures" / "clients.pdf"
    stale.parent.mkdir()
    stale.write_bytes(b"%PDF")
    (run / "figures" / "own.pdf").write_bytes(b"%PDF")
    (run / "tables").mkdir()
    (run / "tables" / "targets.tex").write_text("old")
    make_report([run], figures=False)
    assert [file.name for file in stale.parent.iterdir()] == ["own.pdf"]
    assert not [*(run / "tables").iterdir()]


def test_metrics_of_the_users_own_are_drawn(page_of_two_methods):
    text = page_of_two_methods[0].read_text(encoding="utf-8")
    assert "f1 on the test set against rounds." in text
    assert "f1 on the training set" not in text  # which nobody measured


@pytest.mark.parametrize(("most", "scale"), [(1.0, "linear"), (20.0, "log")])
def test_an_own_metric_in_0_to_1_is_drawn_as_a_share(tmp_path, most, scale):
    for seed, first in enumerate((0.01, 0.09)):
        rows = [row | {"test_f1": f1} for row, f1 in zip(make_rows(2, "fedavg", 0), (first, most - first), strict=True)]
        write_run(tmp_path / str(seed), seed=seed, rows=rows)
    made = compare([tmp_path])
    scene = Scene(made.groups, made.criterion, made.targets, 1, made.baseline)
    axes = own_metrics(made.runs).plots[0].draw(scene, PAPER).axes[0]
    assert axes.get_yscale() == scale
    assert scale == "log" or (axes.get_ylim()[0] >= -0.01 and axes.get_ylim()[1] <= 1.01)


@pytest.mark.parametrize(("rounds", "every", "marker"), [(100, 20, "o"), (20, 20, "o"), (60, 1, "None")])
def test_markers_show_where_sparse_curves_were_measured(tmp_path, rounds, every, marker):
    figure = drawn(write_run(tmp_path / "run", rows=make_rows(rounds, "fedavg", 0, every)))
    (line,) = (line for line in figure.axes[0].lines if line.get_label() == "FedAvg")
    assert line.get_marker() == marker
    assert len(line.get_xdata()) == rounds // every


def test_a_single_measured_round_that_no_other_seed_has_is_a_point(tmp_path):
    write_run(tmp_path / "measured", seed=0, rows=make_rows(20, "fedavg", 0, every=20))
    write_run(tmp_path / "still-going", seed=1, rows=make_rows(5, "fedavg", 1, every=20), status=None)
    (point,) = (line for line in drawn(tmp_path).axes[0].lines if list(line.get_xdata()) == [20])
    assert point.get_marker() == "o"


@pytest.mark.parametrize(("late", "edges"), [((0.9, 0.94), (0.82, 1.0)), ((0.7, 0.74), (0.62, 0.82))])
def test_an_axis_of_fractions_shows_the_bands(tmp_path, late, edges):
    """Whole, where they are wider than the course of the means; up to 100 %."""
    for seed in (0, 1):
        apart = (seed - 0.5) * 0.16 / 2**0.5
        rows = [row | {"test_accuracy": late[row["round"] > 2] + apart} for row in make_rows(4, "fedavg", seed)]
        write_run(tmp_path / str(seed), seed=seed, rows=rows)
    axes = drawn(tmp_path).axes[0]
    assert axes.get_ylim()[0] <= edges[0]
    assert edges[1] <= axes.get_ylim()[1] <= edges[1] + 0.03


def test_bands_that_reach_below_0_end_at_the_edge_of_a_logarithmic_axis(tmp_path, recwarn):
    for seed, losses in enumerate([(1.0, 0.01, 0.01), (1.2, 0.011, 0.5)]):
        rows = [row | {"test_loss": loss} for row, loss in zip(make_rows(3, "fedavg", seed), losses, strict=True)]
        write_run(tmp_path / str(seed), seed=seed, rows=rows)
    axes = drawn(tmp_path, LOSS).axes[0]
    bottom, top = axes.get_ylim()
    (band,) = axes.collections[0].get_paths()
    assert axes.get_yscale() == "log"
    assert (bottom, top) == pytest.approx((0.0105 / 1.3, 1.1 * 1.2))
    assert band.vertices[:, 1].min() == pytest.approx(bottom)  # 0.255 − 0.346
    assert to_files(axes.figure)[".pdf"].startswith(b"%PDF")
    assert not recwarn.list


def drawn(folder, section=ACCURACY):
    """The figure of a section's measure against rounds, of the runs in a folder."""
    made = compare([folder])
    return section.plots[0].draw(Scene(made.groups, made.criterion, made.targets, 1, made.baseline), PAPER)


def test_one_run_is_reported_in_its_own_folder(tmp_path):
    folder = write_run(tmp_path / "run", rows=make_rows(3, "fedexp", 0), status=None)
    assert make_report([folder], figures=False) == folder / "report.html"
    before = (folder / "report.html").read_bytes()
    assert make_report([folder], figures=False).read_bytes() == before
    (folder / "report.html").write_text("<html>mine</html>")
    with pytest.raises(InputError, match="not written by hpcfed report"):
        make_report([folder], figures=False)
    assert (folder / "report.html").read_text() == "<html>mine</html>"


def test_a_run_of_a_single_round_without_any_measurement(tmp_path):
    rows = [dict.fromkeys(make_rows(1, "fedavg", 0)[0]) | {"round": 1}]
    page = make_report([write_run(tmp_path / "run", rows=rows)])
    assert "–" in page.read_text(encoding="utf-8")
    assert not (page.parent / "figures").exists()


def test_clients_without_a_finite_value_have_no_figure(tmp_path):
    run = write_run(tmp_path / "run")
    write_clients(run, [float("inf"), float("nan")])
    make_report([run])
    assert "clients.png" not in {path.name for path in (run / "figures").iterdir()}


def test_folders_that_are_not_ours_are_left_alone(tmp_path):
    runs = [write_run(tmp_path / str(seed), seed=seed, rows=make_rows(3, "fedavg", seed)) for seed in range(2)]
    make_report([runs[0]], figures=False)
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


def test_a_title_names_a_few_groups():
    assert _title(["a", "b", "c", "d", "e"]) == "a, b, c, d and 1 more"
    assert _title(["a" * 60, "b" * 30, "c"]) == f"{'a' * 60} and 2 more"


def test_names_are_escaped(tmp_path):
    change = {"algorithm": {"factory": "<script>alert(1)</script>:$x_1$"}, "data": "a&b<i>.h5"}
    run = write_run(tmp_path / "run", rows=make_rows(3, "fedavg", 0), change=change)
    text = make_report([run], figures=False).read_text(encoding="utf-8")
    assert "alert" not in "".join(re.findall(r"<script.*?</script>", text, flags=re.DOTALL))
    assert "&lt;script&gt;alert(1)&lt;/script&gt;:$x_1$" in text
    assert "a&amp;b&lt;i&gt;.h5" in text


def test_names_in_a_record_are_text_and_no_paths(tmp_path):
    """A record from elsewhere has any names: of metrics, and of models in ``clients.csv``."""
    odd = "$\\frac{$\x1b[2J\n\\input{x}"
    rows = [row | {f"test_{odd}": 0.5, "test_a/../../../out": 0.5} for row in make_rows(3, "fedavg", 0)]
    run = write_run(tmp_path / "runs" / "run", rows=rows)
    with (run / "clients.csv").open("w", newline="", encoding="utf-8") as file:
        head, line = ["round", "client", "model", "split", "loss", "accuracy", "n"], [3, 0, odd, "test", 0.1, 0.9, 7]
        csv.writer(file).writerows([head, line])
    (run / "figures" / "test_a").mkdir(parents=True)
    make_report([run], run)
    assert {path.name for path in tmp_path.rglob("*rounds.png")} >= {"test_a-..-..-..-out-rounds.png"}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    for table in (run / "tables").glob("*.tex"):
        assert not re.search(r"^\\input|\x1b", table.read_text(encoding="utf-8"), re.MULTILINE), table


def test_reader_is_warned(tmp_path):
    folders = [
        write_run(tmp_path / "a", rows=make_rows(3, "fedavg", 0)),
        write_run(tmp_path / "b", seed=1, rows=make_rows(2, "fedavg", 0), status=None),
        write_run(tmp_path / "a2", rows=make_rows(3, "fedavg", 0)),
        write_run(
            tmp_path / "d",
            "fedprox",
            rows=make_rows(4, "fedprox", 0, every=2),
            change={"name": "c", "evaluate": {"every": 2}},
        ),
        write_run(
            tmp_path / "c", "fedexp", rows=make_rows(2, "fedexp", 0), status="diverged", change={"data_content": "0"}
        ),
    ]
    (folders[3] / "certificate.json").write_text(json.dumps({"files": {"metrics.jsonl": "0" * 64}}))
    for name, status in (("e", None), ("f", "failed")):
        write_run(tmp_path / "more" / name, rows=[], status=status)
    arguments = [*map(str, folders), str(tmp_path / "more"), "--output", str(tmp_path / "report"), "--page-only"]
    said = CliRunner().invoke(command, arguments, catch_exceptions=False).output
    text = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    for warning in (
        "FedAvg: unfinished",
        "more than one run of seed 0: each seed counts once",
        "the same number of rounds (FedAvg 3, FedProx 4)",
        "FedExP: diverged",
        "in the same rounds (FedAvg every 1, FedProx every 2, FedExP every 1): best values",
        "not train on the same data",
        f"FedProx: {tmp_path}/d/metrics.jsonl is not the file named in the certificate.",
        f"Left out, for they have no rounds yet: {tmp_path}/more/e.",
        f"Left out, for they failed in their first round: {tmp_path}/more/f.",
    ):
        assert warning in text
        assert warning in said
    assert "that even the worst finished run ended with" in text
    so_far = make_report([folders[1]], figures=False).read_text(encoding="utf-8")
    assert "that even the worst run has so far, rounded" in so_far


def test_the_privacy_of_a_group_is_that_of_its_longest_run(tmp_path):
    """Also where the first run ended early."""
    privacy = {"level": "client", "neighbours": "added", "delta": 1e-5, "noise_multiplier": 1.0, "clip": 1.0}
    privacy |= {"cohorts": "drawn", "accountant": "RDP", "noise": "of the server", "withheld": ["local_loss", "cohort"]}
    for seed, rounds in enumerate((2, 4, 3)):
        rows = [{**row, "epsilon": 0.5 * row["round"]} for row in make_rows(rounds, "fedavg", seed)]
        folder = write_run(tmp_path / "runs" / f"s-{seed}", seed=seed, rows=rows)
        (folder / "environment.json").write_text(json.dumps({"privacy": privacy}))
    found = CliRunner().invoke(command, [str(tmp_path / "runs"), "--output", str(tmp_path / "report"), "--page-only"])
    assert "differential privacy of each client (added): ε 2 at δ 1e-05" in found.output
    assert "Its record withholds local_loss, cohort." in found.output  # why its columns have dashes


@pytest.mark.every(2)
@pytest.mark.parametrize("masked", [False, True])
def test_updates_that_were_left_out_are_reported(masked, tmp_path):
    """By client, over the runs of a group, and why."""
    masks = {"secure_aggregation": {"dropout": 0.1, "survivors": 2}} if masked else {}
    rows = [{**row, "skipped": [2] if row["round"] < 3 else []} for row in make_rows(4, "fedavg", 0)]
    for seed in (0, 1):
        write_run(tmp_path / f"bad-{seed}", seed=seed, rows=rows, change={"name": "bad", **masks})
    found = CliRunner().invoke(command, [str(tmp_path), "--output", str(tmp_path / "report"), "--page-only"])
    why = (
        "clients dropped out, or too few were left to open the sum (secure_aggregation)"
        if masked
        else "updates were left out (on_bad_client: skip)"
    )
    line = f"FedAvg: {why}, of 8 rounds: client 2 in 4."
    assert line in found.output.splitlines()
    assert line in (tmp_path / "report/report.html").read_text()


@pytest.mark.soak
def test_a_figure_of_many_runs_is_drawn_without_a_warning(tmp_path, recwarn):
    rows = make_rows(2, "fedavg", 0)
    for number in range(40):
        local = {"steps": 20, "batch_size": 50, "lr": 0.1 + number / 100, "momentum": number / 1000}
        write_run(tmp_path / f"run-{number}", rows=rows, change={"name": "x", "local": local})
    made = compare([tmp_path])
    scene = Scene(made.groups, made.criterion, made.targets, 1, made.baseline)
    figure = ACCURACY.plots[0].draw(scene, PAPER)
    assert to_files(figure)[".png"].startswith(b"\x89PNG")
    assert not recwarn.list
    assert figure.legends[0].texts[-1].get_text() == "and 12 more, which look like these"
    (axes,) = SecondsPlot("seconds", "").draw(scene, PAPER).axes
    assert len(axes.get_yticklabels()) == DISTINCT == 28
    assert axes.get_xlabel().endswith("of the first 28 of 40")


def test_the_terminal_shows_the_first_rows_of_a_long_table(capsys):
    rows = tuple((f"run-{number}", "1") for number in range(1000))
    print_table(Table("Results", ("Method", "Rounds"), rows))
    shown = capsys.readouterr().out
    assert shown.count("run-") == MOST_ROWS
    assert shown.splitlines()[-1] == "and 940 more rows, which the files have"


def test_long_labels_of_bars_stay_apart_and_solid_lines_lie_below_dashed_ones(tmp_path):
    for number in range(5):
        name = f"{number}-{'a long name ' * (4 * (number % 2))}"
        write_run(tmp_path / str(number), rows=make_rows(3, "fedavg", 0), change={"name": name, "rounds": 3 + number})
    made = compare([tmp_path])
    scene = Scene(made.groups, made.criterion, made.targets, 1, made.baseline)
    figure = SecondsPlot("seconds", "").draw(scene, PAPER)
    to_files(figure)
    boxes = sorted((label.get_window_extent() for label in figure.axes[0].get_yticklabels()), key=lambda box: box.y0)
    assert len(boxes) == 5
    assert all(below.y1 <= above.y0 for below, above in itertools.pairwise(boxes))
    lines = [line for line in drawn(tmp_path).axes[0].lines if line.get_label()[0] in "01234"]
    assert [line.get_label()[0] for line in sorted(lines, key=lambda line: line.zorder)] == list("04123")


@pytest.mark.soak
def test_letters_that_the_font_lacks_are_no_warning_of_matplotlib(recwarn):
    """On the page they stay text; where no font here has them, one line of ours says so."""
    figure, axes = blank(PAPER)
    axes.plot([0, 1], label="東京病院")
    axes.legend()
    assert "東京病院" in to_svg(figure, "figure")
    assert to_files(figure)[".png"].startswith(b"\x89PNG")
    assert [str(one.message)[:26] for one in recwarn.list] in ([], ["pictures: no font here has"])


@pytest.mark.parametrize("target", ["90", "0", "-1", "nan"])
def test_target_must_be_a_fraction(tmp_path, target):
    run = write_run(tmp_path / "run", rows=make_rows(3, "fedavg", 0))
    with pytest.raises(InputError, match="fraction above 0 and up to 1"):
        make_report([run], None, [float(target)])


def test_command_prints_the_tables_and_where_the_files_are(tmp_path):
    write_run(tmp_path / "fedexp", "fedexp", rows=make_rows(3, "fedexp", 0))
    arguments = [str(tmp_path), "--target", "0.9", "--window", "2", "--page-only"]
    arguments += ["--baseline", "fedexp", "--output", str(tmp_path / "report")]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "FedExP" in result.output
    assert "mean of 2 evaluations" in result.output
    assert str(tmp_path / "report" / "report.html") in result.output


def test_baseline_must_be_a_method_of_the_report(tmp_path):
    run = write_run(tmp_path / "run", "fedexp", rows=make_rows(2, "fedexp", 0))
    with pytest.raises(InputError, match="did you mean 'FedExP'"):
        compare([run], baseline="FedEx")


def test_report_imports_neither_torch_nor_mpi():
    check = "import sys, hpcfed.lab.report, hpcfed.cli.report; print({'torch', 'mpi4py', 'h5py'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "set()"
