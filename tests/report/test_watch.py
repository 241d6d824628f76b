"""`hpcfed watch`: reading of growing records, the drawing, and the end of the command."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from hpcfed.cli.watch import command
from hpcfed.errors import InputError
from hpcfed.io.atomic import write_whole
from hpcfed.lab.watch.canvas import BLANK, Canvas, Series, chart
from hpcfed.lab.watch.follow import Watch
from hpcfed.lab.watch.view import plain, view
from tests.launch import ROOT
from tests.report.conftest import make_rows, write_run


def lines_of(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def follow(folder: Path):
    watch = Watch([folder])
    watch.look()
    (run,) = watch.runs
    return run


def test_only_what_is_new_is_read_and_half_a_line_waits(tmp_path):
    folder = write_run(tmp_path / "run", rows=make_rows(3, "fedexp", 0), status=None)
    record = folder / "metrics.jsonl"
    run = follow(folder)
    assert (run.done, run.rounds, run.is_over) == (3, 60, False)
    text = lines_of(make_rows(5, "fedexp", 0))
    for end, done in ((len(text) - 30, 4), (len(text), 5)):
        record.write_text(text[:end])
        run.look()
        assert run.done == done
    assert run.seconds_left() == pytest.approx(55 * 0.26)
    assert run.columns["test_accuracy"] == [row["test_accuracy"] for row in make_rows(5, "fedexp", 0)]


def test_half_a_line_waits_also_if_its_end_is_written_as_it_is_read(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", rows=make_rows(3, "fedexp", 0), status=None)
    run, record, text = follow(folder), folder / "metrics.jsonl", lines_of(make_rows(4, "fedexp", 0))
    record.write_text(text[:-30])

    class Growing(io.FileIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size)
            record.write_text(text)
            return line

    with monkeypatch.context() as patch:
        patch.setattr("hpcfed.lab.watch.follow.open_file", Growing)
        run.look()
    assert run.done == 3
    run.look()
    assert run.done == 4


def test_a_record_that_was_cut_is_read_anew(tmp_path):
    folder = write_run(tmp_path / "run", rows=make_rows(6, "fedavg", 0), status=None)
    run = follow(folder)
    (folder / "metrics.jsonl").write_text(lines_of(make_rows(2, "fedavg", 0)))
    run.look()
    assert run.done == 2


def test_a_record_that_was_cut_and_has_grown_since_is_read_anew(tmp_path):
    folder = write_run(tmp_path / "run", rows=make_rows(6, "fedavg", 0), status=None)
    run = follow(folder)
    write_whole(folder / "metrics.jsonl", lines_of(make_rows(9, "fedexp", 0)))
    run.look()
    assert run.columns["local_loss"] == [row["local_loss"] for row in make_rows(9, "fedexp", 0)]


def test_columns_may_begin_late_and_be_objects(tmp_path):
    rows = [row | {"clients": None, "unit": {"delta": -3}} for row in make_rows(3, "fedavg", 0)]
    rows[1]["clients"] = {"global": {"test": {"loss": {"mean": 0.5}}}}
    columns = follow(write_run(tmp_path / "run", rows=rows)).columns
    assert np.isnan(columns["clients.global.test.loss.mean"]).tolist() == [True, False, True]
    assert columns["unit.delta"] == [-3, -3, -3]


def test_how_a_run_stands(tmp_path):
    folder = write_run(tmp_path / "run", rows=make_rows(4, "fedavg", 0), status=None)
    run = follow(folder)
    assert "0:15 left" in plain(run)
    long_ago = time.time() - 500
    os.utime(folder / "metrics.jsonl", (long_ago, long_ago))
    run.look()
    assert "silent for 8:20" in plain(run)
    (folder / "result.json").write_text(json.dumps({"status": "diverged", "rounds": 4}))
    run.look()
    assert plain(run).endswith("diverged")
    (folder / "metrics.jsonl").unlink()
    (folder / "result.json").unlink()
    assert plain(follow(folder)) == "run: round 0/60  no rounds yet"
    (folder / "result.json").write_text(json.dumps({"status": "failed", "rounds": 0}))
    assert plain(follow(folder)) == "run: round 0/60  failed"


def test_damaged_records_and_folders_without_runs_are_refused(tmp_path):
    with pytest.raises(InputError, match="not a run folder"):
        Watch([tmp_path]).look()
    with pytest.raises(InputError, match="no such folder"):
        Watch([tmp_path / "absent"]).look()
    folder = write_run(tmp_path / "run", rows=make_rows(2, "fedavg", 0))
    (folder / "metrics.jsonl").write_text("{oops\n")
    with pytest.raises(InputError, match="line 1: not JSON"):
        follow(folder)


def test_runs_that_begin_later_are_waited_for(tmp_path):
    sweep = tmp_path / "sweep"
    program = [sys.executable, "-m", "hpcfed", "watch", str(sweep), "--every", "0.1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout.readline() == f"waiting for a run in {sweep}; Ctrl-C leaves\n"
        (tmp_path / "sweep-7.log").touch()
        assert job.stdout.readline() == f"its job writes to {tmp_path / 'sweep-7.log'}\n"
        (sweep / "claims").mkdir(parents=True)
        (sweep / "sweep.yaml").write_text("{sweep: made, runs: 3, grids: {}, seeds: ['0', '1']}")
        write_run(sweep / "runs" / "lr=0.1" / "seed-0", rows=make_rows(3, "fedavg", 0))
        assert job.stdout.readline().startswith("seed-0: round 3/60")  # finished, but not the sweep's last
        write_run(sweep / "runs" / "lr=0.2", rows=make_rows(2, "fedavg", 0))
        write_run(sweep / "runs" / "lr=0.1" / "seed-1", rows=make_rows(3, "fedavg", 1))
        assert job.wait(timeout=60) == 0
        assert sorted(line.split(":")[0] for line in job.stdout) == ["lr=0.2", "seed-1"]
    finally:
        job.kill()
        job.wait()
        job.stdout.close()


def test_a_canvas_sets_the_dots_on_a_line():
    canvas = Canvas(2, 1)
    canvas.line((0, 0), (1, 1), "red")
    canvas.dot(1.5, 0.5, "red")  # outside
    (row,) = canvas.rows()
    assert [ord(character) - BLANK for character in row.plain] == [0x40 | 0x20, 0x02 | 0x08]


def test_a_chart_is_as_large_as_asked_and_logarithmic_where_a_loss_spans_a_decade():
    series = [Series("red", range(1, 61), [100 * 0.9**round for round in range(60)])]
    drawn = chart("loss", series, 60, 50, 10, is_percentage=False)
    assert len(drawn) == 10
    assert drawn[0].plain.strip() == "loss, logarithmic"
    assert {len(line.plain) for line in drawn[1:-1]} == {50}
    columns = [line.plain[8:] for line in drawn[1:-1]]
    heights = [next(row for row, line in enumerate(columns) if line[column] != chr(BLANK)) for column in range(42)]
    assert heights == sorted(heights)  # a straight line, downwards
    assert [drawn[1].plain.split()[0], drawn[-2].plain.split()[0]] == ["100", f"{100 * 0.9**59:.3g}"]


@pytest.mark.parametrize("values", [(-1.7e308, 1.7e308), (1.7e308, 1.7e308), (5e-324, 1.7e308), (0.0, 5e-324)])
def test_values_at_the_ends_of_float64_are_drawn(values):
    drawn = chart("loss", [Series("red", (1, 2), values)], 2, 50, 10, is_percentage=False)
    assert any(set(line.plain[8:]) - {chr(BLANK)} for line in drawn[1:-1])


@pytest.mark.parametrize(("width", "height"), [(60, 20), (100, 24), (200, 60)])
def test_the_view_fits_the_terminal(tmp_path, width, height):
    for method in ("fedavg", "fedexp"):
        write_run(tmp_path / method, method, rows=make_rows(20, method, 0), status=None)
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    for watch in (Watch([tmp_path]), Watch([tmp_path / "fedexp"])):
        watch.look()
        console.print(view(watch.runs, width, height))
        text = console.export_text()
        assert len(text.splitlines()) <= height
        assert max(map(len, text.splitlines())) <= width
        assert "20/60" in text
        assert "0:10 left" in text
        assert any(chr(BLANK) < character < chr(BLANK + 256) for character in text)
        assert "round 20" in text  # where the axis ends, although there are to be 60 rounds


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_or_low_terminal_has_whole_numbers_and_every_run(tmp_path, width):
    """Columns are left out where all of them would be cut, and the chart where the runs would be below the edge."""
    for number in range(4):
        write_run(tmp_path / f"{number}-{'long' * 20}", rows=make_rows(20, "fedavg", number), status="finished")
    watch = Watch([tmp_path])
    watch.look()
    text = io.StringIO()
    Console(file=text, width=width).print(view(watch.runs, width, 10))
    head, *rows = (line.split() for line in text.getvalue().splitlines())
    assert head[:3] == ["run", "round", "accuracy"]
    assert [row[0][0] for row in rows] == ["0", "1", "2", "3"]
    assert {row[-1] for row in rows} == {"finished"}
    assert all("…" not in cell for row in [head, *rows] for cell in row[1:])
    text.seek(0)
    Console(file=text, width=width).print(view(watch.runs, width, 10, scrolls=True))
    assert "test accuracy" in text.getvalue()


def test_a_client_without_a_value_has_a_dash(tmp_path):
    run = write_run(tmp_path / "run")
    header = "round,client,model,split,loss,accuracy,n,name"
    (run / "clients.csv").write_text(f"{header}\n3,0,global,test,1.0,0.5,8,north\n3,1,global,test,,,0,south\n")
    text = io.StringIO()
    Console(file=text, width=100).print(view([follow(run)], 100, 30))
    assert "north 50.0 %  south –" in text.getvalue()


def test_without_a_terminal_it_says_a_line_a_run(tmp_path):
    for method in ("fedavg", "fedexp"):
        write_run(tmp_path / method, method, rows=make_rows(3, method, 0))
    write_run(tmp_path / "going-on", rows=make_rows(3, "fedavg", 0), status=None)
    result = CliRunner().invoke(command, [str(tmp_path), "--once"], catch_exceptions=False)
    assert [line.split(":")[0] for line in result.output.splitlines()] == ["fedavg", "fedexp", "going-on"]
    ended = CliRunner().invoke(command, [str(tmp_path / "fedexp")], catch_exceptions=False)
    assert (ended.exit_code, ended.output.count("\n"), "imbalance" in ended.output) == (0, 1, True)
    withheld = {"imbalance": None, "local_loss": None, "cohort": [], "skipped": []}  # as of a private run
    write_run(tmp_path / "private", rows=[{**row, **withheld} for row in make_rows(3, "fedavg", 0)])
    said = CliRunner().invoke(command, [str(tmp_path / "private")], catch_exceptions=False).output
    assert ("imbalance" in said, "nan" in said) == (False, False)


def test_on_a_terminal_it_draws_until_the_run_ends(tmp_path):
    folder = write_run(tmp_path / "run", rows=make_rows(3, "fedexp", 0), status=None)
    program = [sys.executable, "-m", "hpcfed", "watch", str(folder), "--every", "0.1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    ours, theirs = pty.openpty()
    job = subprocess.Popen(program, env=environment, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    try:
        seen = read_until(ours, "3/60")
        (folder / "metrics.jsonl").write_text(lines_of(make_rows(60, "fedexp", 0)))
        seen += read_until(ours, "60/60")
        (folder / "result.json").write_text(json.dumps({"status": "finished", "rounds": 60}))
        seen += read_until(ours, "finished")
        assert job.wait(timeout=30) == 0
    finally:
        job.kill()
        job.wait()
        os.close(ours)
    assert re.search("[\u2801-\u28ff]", seen)


def read_until(terminal: int, text: str) -> str:
    seen = b""
    while text not in seen.decode("utf-8", errors="replace"):
        seen += os.read(terminal, 65536)
    return seen.decode("utf-8", errors="replace")


def test_watch_needs_neither_torch_nor_matplotlib(tmp_path):
    folder = write_run(tmp_path / "run", rows=make_rows(3, "fedexp", 0))
    program = (
        "import sys; sys.modules.update(torch=None, mpi4py=None, h5py=None, matplotlib=None)\n"
        "from hpcfed.cli.watch import command; command()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "round 3/60" in done.stdout
