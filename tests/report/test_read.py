"""Reading run folders: complete ones, optional files, and refusals in one line."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from hpcfed.errors import InputError
from hpcfed.lab.report.read import find_runs, read_run
from hpcfed.run_folder.rounds import complete, line_of
from tests.report.conftest import make_rows, read_runs, write_run
from tests.report.test_watch import follow


def test_nulls_are_nan_and_sums_are_kept(tmp_path):
    run = read_run(write_run(tmp_path / "run", rows=make_rows(10, "fedavg", 0, every=5)))
    evaluated = np.flatnonzero(np.isfinite(run.column("test_accuracy")))
    assert evaluated.tolist() == [4, 9]
    assert np.isnan(run.column("train_loss")).all()
    assert run.column("params")[0] == 2 * 1_781_100
    assert run.column("round").tolist() == list(range(1, 11))


def test_what_is_not_finite_is_null_and_old_records_with_nan_are_read(tmp_path):
    rows = make_rows(2, "fedavg", 0)
    rows[0] |= {"test_loss": math.nan, "clients": {"global": {"mean": [math.inf]}}}
    line = line_of(rows[0])
    assert '"test_loss": null' in line
    assert '"mean": [null]' in line
    for text in (line, json.dumps(rows[0]) + "\n"):
        folder = write_run(tmp_path / str(len(text)), rows=rows)
        (folder / "metrics.jsonl").write_text(text)
        assert np.isnan(read_run(folder).column("test_loss")).tolist() == [True]


def test_what_is_written_while_a_record_is_read_is_left_out():
    assert list(complete([b'{"round": 1}\n', b'{"rou', b'nd": 2}\n'])) == [b'{"round": 1}\n']
    assert list(complete([b'{"round": 1}', b"\n", b'{"round": 2}\n'])) == [b'{"round": 1}']


def test_partial_last_line_is_left_out(tmp_path):
    folder = write_run(tmp_path / "run", rows=make_rows(4, "fedavg", 0), status=None)
    record = folder / "metrics.jsonl"
    text = record.read_text()
    for cut in (1, 2, 40):
        record.write_text(text[:-cut])
        assert read_run(folder).num_rounds == (4 if cut == 1 else 3)  # only the newline is missing: the round is whole


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [lines[0], "{oops", lines[2]], "line 2: not JSON"),
        (lambda lines: [lines[0], lines[2]], "line 2: rounds out of order"),
        (lambda lines: [lines[0], "[1, 2]", lines[2]], "line 2: rounds out of order"),
        (lambda lines: [lines[0].replace('"gradients": 10000', '"gradients": "many"')], "line 1: gradients"),
        (lambda lines: [lines[0].replace('"gradients": 10000', f'"gradients": {10**400}')], "line 1: not JSON"),
        (lambda lines: [lines[0], lines[1][:-1] + f', "more": {"9" * 5000}}}'], "line 2: not JSON"),
        (lambda lines: [lines[0], "[" * 100_000], "line 2: not JSON"),
        (lambda lines: [lines[0], "\0" * 9, lines[2]], "line 2: not JSON"),
        (lambda lines: [lines[0].replace('"seconds": {', '"seconds": [{').replace("}", "}]", 1)], "line 1: seconds"),
        (lambda lines: [], "no rounds yet"),
    ],
)
def test_damaged_record_is_refused_by_line(tmp_path, damage, message):
    folder = write_run(tmp_path / "run", rows=make_rows(3, "fedavg", 0))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in damage(lines)))
    for read in (read_run, follow):
        if read is read_run or message != "no rounds yet":
            with pytest.raises(InputError, match=message) as error:
                read(folder)
            assert "\n" not in str(error.value)
            assert len(str(error.value)) < 400 + len(str(folder))


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", "clients.csv", "result.json"])
@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_what_is_no_file_is_not_read(tmp_path, name, kind):
    """An archive from anybody may have a link to a device without an end, or a pipe that waits for its writer."""
    folder = write_run(tmp_path / "run", rows=make_rows(3, "fedavg", 0))
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    for read in (read_run, follow):
        if read is read_run or name != "clients.csv":
            with pytest.raises(InputError, match="not a file"):
                read(folder)


def test_folders_that_are_no_runs_are_refused(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        read_runs([tmp_path / "absent"])
    with pytest.raises(InputError, match="not a run folder"):
        read_runs([tmp_path])
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match=r"metrics\.jsonl: no such file"):
        read_runs([folder])


def test_recipe_must_be_plain_yaml(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "recipe.yaml").write_text("data: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(InputError, match=r"recipe\.yaml: not YAML"):
        read_run(folder)


def test_a_run_to_which_seeds_were_added_is_read_with_them(tmp_path):
    for name in ("run", "run/seed-1", "run/seed-2"):
        write_run(tmp_path / name, rows=make_rows(2, "fedavg", 0))
    runs = [tmp_path / name for name in ("run", "run/seed-1", "run/seed-2")]
    assert find_runs([tmp_path / "run"])[0] == find_runs([tmp_path])[0] == runs


def test_a_sweeps_folder_stands_for_its_runs_and_one_of_seeds_for_them(tmp_path):
    for name in ("runs/lr=0.1/seed-0", "runs/lr=0.1/seed-1", "runs/lr=0.2"):
        write_run(tmp_path / "sweep" / name, rows=make_rows(2, "fedavg", 0))
    write_run(tmp_path / "sweep" / "runs" / "lr=0.3", rows=[], status=None)
    (tmp_path / "sweep" / "sweep.yaml").write_text("{sweep: made, runs: 4}")
    runs, waiting = find_runs([tmp_path / "sweep"])
    assert [str(run.relative_to(tmp_path / "sweep" / "runs")) for run in runs] == [
        "lr=0.1/seed-0", "lr=0.1/seed-1", "lr=0.2"
    ]  # fmt: skip
    assert [run.name for run in waiting] == ["lr=0.3"]
    assert find_runs([tmp_path / "sweep" / "runs"])[0] == runs
    assert find_runs([tmp_path])[0] == runs  # as a study and a paper's experiment have it
    with pytest.raises(InputError, match=r"lr=0\.3/metrics\.jsonl: no rounds yet"):
        read_runs(waiting)
    (waiting[0] / "result.json").write_text('{"status": "diverged", "rounds": 0, "message": "round 1: too far"}')
    with pytest.raises(InputError, match=r"lr=0\.3/metrics\.jsonl: no rounds: diverged: round 1: too far"):
        read_runs(waiting)
    write_run(tmp_path / "seeds" / "seed-0", rows=[], status=None)
    with pytest.raises(InputError, match="no rounds yet: got 1 runs; wait for the first round of one"):
        find_runs([tmp_path / "seeds"])
    (tmp_path / "seeds" / "seed-0" / "result.json").write_text('{"status": "failed", "rounds": 0, "message": "why"}')
    with pytest.raises(InputError, match=r"seed-0/metrics\.jsonl: no rounds: failed: why"):
        find_runs([tmp_path / "seeds"])


def test_runs_of_a_folder_are_in_the_order_of_their_numbers(tmp_path):
    """Names of any form: with a number at the end, without one, one the beginning of another."""
    names = ["rho-0", "rho-0.05", "rho-0.5", "rho-1e-3", "rho-2", "rho-10", "rho", "rho2", "rho-2.", "5", "05"]
    for name in names:
        write_run(tmp_path / name)
    found = [run.name for run in find_runs([tmp_path])[0]]
    ordered = ["05", "5", "rho", "rho2", "rho-0", "rho-1e-3", "rho-0.05", "rho-0.5", "rho-2", "rho-2.", "rho-10"]
    assert found == ordered


def test_a_folder_of_runs_stands_for_them_and_repetition_does_not_count(tmp_path):
    folders = [write_run(tmp_path / "all" / str(seed), seed=seed) for seed in range(3)]
    runs = read_runs([tmp_path / "all", folders[1], Path(f"{folders[0]}/../0")])
    assert [run.seed for run in runs] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("result", "status"),
    [
        ({"status": "finished", "rounds": 5}, "finished"),
        ({"status": "stopped", "rounds": 3}, "unfinished"),  # resumed: the record has outgrown the result
        ({"status": "diverged", "rounds": 3}, "diverged"),
        (None, "unfinished"),
    ],
)
def test_status(tmp_path, result, status):
    folder = write_run(tmp_path / "run", rows=make_rows(5, "fedavg", 0), status=None)
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    (folder / "environment.json").unlink()
    run = read_run(folder)
    assert run.status == status
    assert run.environment == {}
