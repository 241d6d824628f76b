"""Failures in mid-run: the job ends on all ranks with the right exit code and one line that names the place.

What it must not wait for takes longer than `launch` does: how soon it ends on a loaded machine is nobody's promise.
"""

from __future__ import annotations

import platform

import pytest

from tests.launch import launch, own_line, own_lines
from tests.mpi.recipes import write_recipe, write_small


def check_the_end(place, done, client):
    """Client k, at home on rank k, raised in round 2."""
    assert done.returncode == 2
    line = own_line(done.stderr)
    for told in (
        "round 2",
        f"client {client}",
        f"rank {client}",
        "misbehaving.py, line",
        "RuntimeError: broken sensor",
        f"rank-{client}.log",
    ):
        assert told in line
    logs = {path.name: path.read_text() for path in (place.run / "logs").iterdir()}
    assert list(logs) == [f"rank-{client}.log"]
    assert "Traceback" in logs[f"rank-{client}.log"]
    assert [row["round"] for row in place.rows()] == [1]
    assert not (place.run / "model.safetensors").exists()


def test_a_client_that_raises_ends_the_job_which_can_start_again(place):
    """The other ranks wait in the round's Allreduce already."""
    args = {"deed": "fail", "whose": 1, "visit": 2}
    check_the_end(place, place.start(args=args), 1)
    assert place.ending()["status"] == "failed"
    assert "broken sensor" in place.ending()["message"]
    text = (place.path / "misbehaving.py").read_text()
    (place.path / "misbehaving.py").write_text(text.replace('raise RuntimeError("broken sensor")', "pass"))
    assert place.start(0, args=args).returncode == 0
    assert place.ending()["status"] == "finished"
    assert (place.run / "previous-1" / "logs" / "rank-1.log").exists()


@pytest.mark.one_mpi
@pytest.mark.parametrize("client", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_client_that_raises_ends_the_job_while_others_train(place, client):
    args = {"deed": "fail", "whose": client, "visit": 2, "nap": 600}
    check_the_end(place, place.start(args=args), client)


@pytest.mark.soak
@pytest.mark.one_mpi
def test_training_that_diverges_says_where(place):
    done = place.start(2, local={"steps": 5, "batch_size": "full", "lr": 1e6, "weight_decay": 1.0})
    assert done.returncode == 3
    line = own_line(done.stderr)
    rows, ending = place.rows(), place.ending()
    assert f"round {len(rows) + 1}, client " in line
    assert "local.lr" in line
    assert [row["round"] for row in rows] == list(range(1, len(rows) + 1))
    assert (ending["status"], ending["rounds"]) == ("diverged", len(rows))
    assert ending["message"] in line


NO_THREADS = "import threading; threading.stack_size(1 << 47); from hpcfed.cli.main import main; main()"
"""Ours need more memory for their stack than there are addresses, so that the system really refuses them."""


@pytest.mark.one_mpi
def test_a_thread_that_cannot_be_started_is_the_machines_failure(tmp_path):
    write_small(tmp_path)
    write_recipe(tmp_path)
    done = launch(0, ["run", "recipe.yaml", "--quiet"], program=("-c", NO_THREADS), cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert "the system gives no more threads (watchdog): got can't start new thread" in own_line(done.stderr)


SCRIPT = """
import hpcfed
from hpcfed.ranks.world import connect

if connect().rank == 1:
    raise ValueError("of the script")
hpcfed.run("recipe.yaml", quiet=True)
"""


@pytest.mark.one_mpi
def test_a_script_that_raises_on_one_rank_ends_the_job(tmp_path):
    """The other would wait for it in the run until the watchdog's time is over."""
    write_small(tmp_path)
    write_recipe(tmp_path)
    done = launch(2, [], program=("-c", SCRIPT), cwd=tmp_path)
    assert done.returncode != 0
    expected = f"hpcfed: rank 1 on {platform.node()}: the script ended with ValueError: of the script"
    assert own_lines(done.stderr)[-2:] == ["ValueError: of the script", expected]


@pytest.mark.parametrize("client", [2, pytest.param(0, marks=pytest.mark.soak)])
def test_a_killed_rank_ends_the_job(place, client):
    """Rank 0 may die with it before it has recorded the round before, but not before the one before that."""
    done = place.start(args={"deed": "die", "whose": client, "visit": 3})
    assert done.returncode != 0
    said = own_line(done.stderr)
    assert f"rank {client} on {platform.node()} was ended by SIGKILL; perhaps for want of memory (dmesg on " in said
    assert [row["round"] for row in place.rows()] in ([1], [1, 2])


@pytest.mark.parametrize("access", ["mmap", pytest.param("memory", marks=pytest.mark.soak)])
@pytest.mark.one_mpi
def test_a_data_file_truncated_in_mid_run_ends_the_job(place, access):
    """Client 0 of round 1 sees it shrink; clients 1 and 2, not read before, are then beyond its end."""
    schedule = place.path / "schedule.json"
    schedule.write_text("[[0], [1], [2], [0]]")
    done = place.start(2, args={"deed": "truncate", "whose": 0}, cohort={"schedule": str(schedule)}, data_access=access)
    assert done.returncode == 4
    line = own_line(done.stderr)
    for told in ("round 2, client 1", "marked.h5", "the data file became shorter"):
        assert told in line
    assert [row["round"] for row in place.rows()] == [1]
    assert not (place.run / "model.safetensors").exists()


@pytest.mark.soak
@pytest.mark.one_mpi
def test_staged_data_are_read_from_the_copy_which_leaves_nothing_behind(place):
    """The file that the recipe names is cut while the run goes on; the scratch folder is empty afterwards."""
    scratch = place.path / "scratch"
    scratch.mkdir()
    done = place.start(2, args={"deed": "truncate", "whose": 0}, data_access="stage", env={"TMPDIR": str(scratch)})
    assert (done.returncode, own_lines(done.stderr)) == (0, [])
    assert [row["round"] for row in place.rows()] == [1, 2, 3, 4]
    assert list(scratch.iterdir()) == []


@pytest.mark.one_mpi
def test_an_evaluation_that_raises_on_one_rank_ends_the_job(place):
    done = place.start(2, args={"deed": "fail", "whose": 101, "visit": 2}, evaluate={"every": 1, "batch_size": 10})
    assert done.returncode == 2
    line = own_line(done.stderr)
    for told in ("round 2", "evaluation", "rank 1", "RuntimeError: broken sensor", "logs/rank-1.log"):
        assert told in line
    assert "Traceback" in (place.run / "logs" / "rank-1.log").read_text()
    assert [row["round"] for row in place.rows()] == [1]
