"""A run belongs to one process at a time, also after that process has died."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from hpcfed.lab.sweep.claims import DEATHS, LEASE, Claim, Claims, RunState
from hpcfed.lab.sweep.run import states_until_stable
from tests.launch import ROOT
from tests.sweep.conftest import endings, read_claims

RUNS = [(f"lr=0.{number}", "digest") for number in range(30)]
PULLER = """
import sys
from pathlib import Path
from hpcfed.lab.sweep.claims import Claims
claims, runs = Claims(Path(sys.argv[1]), sys.argv[2]), [(f"lr=0.{n}", "digest") for n in range(30)]
sys.stdin.readline()  # all begin together
while True:
    states = claims.look(runs)
    open_ = [run for run, _ in runs if states[run].open]
    if not open_:
        break
    number = claims.take(open_[0], "digest", states[open_[0]])
    if number is not None:
        print(open_[0], flush=True)
        claims.end(open_[0], number, "finished")
"""
HOLDER = """
import sys, time
from pathlib import Path
from hpcfed.lab.sweep.claims import Claims
claims = Claims(Path(sys.argv[1]), "holder")
print(claims.take("lr=0.0", "digest", claims.look([("lr=0.0", "digest")])["lr=0.0"]), flush=True)
time.sleep(60)
"""


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", program, *(str(argument) for argument in arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def state_of(claims: Claims):
    return claims.look(RUNS[:1])["lr=0.0"]


def test_of_processes_that_pull_together_each_run_goes_to_one(tmp_path):
    jobs = [start(PULLER, tmp_path, f"job-{number}") for number in range(4)]
    for job in jobs:
        job.stdin.write("\n")
        job.stdin.flush()
    said = [job.communicate(timeout=60)[0].split() for job in jobs]
    assert Counter(run for runs in said for run in runs) == {run: 1 for run, _ in RUNS}
    assert endings(tmp_path) == {"finished": 30}


def test_a_holder_that_is_killed_is_succeeded_and_one_that_lives_is_not(tmp_path):
    claims = Claims(tmp_path, "other")
    holder = start(HOLDER, tmp_path)
    assert holder.stdout.readline() == "1\n"
    assert (state_of(claims).held, state_of(claims).vouched, state_of(claims).open) == (True, True, False)
    assert claims.take("lr=0.0", "digest", type(state_of(claims))()) is None  # as a rank that has not seen it yet
    holder.send_signal(signal.SIGKILL)
    while psutil.Process(holder.pid).status() != psutil.STATUS_ZOMBIE:  # nobody has asked how it ended
        time.sleep(0.01)
    assert (state_of(claims).open, state_of(claims).deaths) == (True, 1)
    holder.communicate()
    assert (state_of(claims).open, state_of(claims).deaths) == (True, 1)
    assert claims.take("lr=0.0", "digest", state_of(claims)) == 2
    assert state_of(claims).held


def test_a_run_is_lost_after_repeated_deaths_of_its_holders_and_may_be_retried(tmp_path):
    claims = Claims(tmp_path, "other")
    for number in range(DEATHS):
        holder = start(HOLDER, tmp_path)
        assert holder.stdout.readline() == f"{number + 1}\n"
        holder.kill()
        holder.communicate()
    assert claims.take("lr=0.0", "digest", state_of(claims)) is None
    assert (state_of(claims).decided, state_of(claims).claim.ending) == (True, "lost")
    claims.reopen("lr=0.0", "digest", state_of(claims))
    assert (state_of(claims).open, state_of(claims).deaths) == (True, 0)


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


LOOKER = """
import sys
from pathlib import Path
from hpcfed.lab.sweep.claims import Claims
sys.stdin.readline()
for _ in range(500):
    assert Claims(Path(sys.argv[1]), "report").look([("lr=0.0", "digest")])["lr=0.0"].held
"""


@pytest.mark.soak
def test_jobs_that_end_together_look_at_once(tmp_path):
    """Each asks the file server for the time, as the claim is one of another node."""
    far = Claims(tmp_path, "far")
    far.take("lr=0.0", "digest", state_of(far))
    path = tmp_path / "claims" / "lr=0.0.1"
    path.write_text(json.dumps({**json.loads(path.read_text()), "node": "elsewhere"}))
    jobs = [start(LOOKER, tmp_path) for _ in range(3)]
    for job in jobs:
        job.stdin.write("\n")
        job.stdin.flush()
    assert [(job.communicate(timeout=60)[0], job.returncode) for job in jobs] == [("", 0)] * 3


def test_results_are_written_again_only_by_the_last_job(monkeypatch):
    """While others have runs, they write later; else each of many jobs would write again until all have ended."""
    ended, going = RunState(1, Claim(ending="finished")), RunState(1, Claim(), held=True, vouched=True)
    for seen, written in [
        ([[ended, going], [ended, ended], [ended, ended]], 2),
        ([[going, going, going], [ended, going, going], [ended, ended, ended]], 1),
        ([[ended], [ended]], 1),
    ]:
        rounds = iter(seen)
        monkeypatch.setattr(
            "hpcfed.lab.sweep.run.run_states", lambda plan, claims, rounds=rounds: dict(enumerate(next(rounds)))
        )
        assert len(list(states_until_stable(None, None))) == written


def test_a_holder_on_another_node_is_known_by_its_touch(tmp_path):
    far = Claims(tmp_path, "far")
    assert far.take("lr=0.0", "digest", state_of(far)) == 1
    path = tmp_path / "claims" / "lr=0.0.1"
    path.write_text(json.dumps({**json.loads(path.read_text()), "node": "elsewhere"}))
    near = Claims(tmp_path, "near")
    age(path, LEASE / 2)
    assert (state_of(near).held, state_of(near).vouched) == (True, False)
    age(path, LEASE / 4)  # touched since
    assert (state_of(near).held, state_of(near).vouched) == (True, True)
    age(path, LEASE + 5)
    assert state_of(near).open
    path.write_text("")  # it died before it wrote its name
    assert state_of(near).held
    age(path, LEASE + 5)
    assert state_of(near).open


def test_a_holder_is_known_whatever_the_clock_is_set_to(tmp_path):
    """Its start counts from the boot of the node: times since 1970 move with every setting of the clock."""
    claims = Claims(tmp_path, "one")
    claims.take("lr=0.0", "digest", state_of(claims))
    (claim,) = read_claims(tmp_path)["lr=0.0"]
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    assert 0 < claim["born"] <= uptime
    assert state_of(Claims(tmp_path, "other")).vouched


@pytest.mark.parametrize("changes", [{"pid": "a"}, {"pid": -1}, {"pid": 2**63}, {"born": None}, {"ending": 3}])
def test_a_claim_that_makes_no_sense_is_one_of_nobody(tmp_path, changes):
    claims = Claims(tmp_path, "one")
    claims.take("lr=0.0", "digest", state_of(claims))
    path = tmp_path / "claims" / "lr=0.0.1"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    for name in ("lr=0.0.²", f"lr=0.0.{'9' * 200}", "lr=0.0.٣"):
        (tmp_path / "claims" / name).touch()
    other = Claims(tmp_path, "other")
    assert not state_of(other).vouched
    age(path, LEASE + 5)
    assert state_of(other).open
    assert state_of(other).last == 1


def test_what_a_holder_was_writing_when_it_was_killed_is_removed(tmp_path):
    claims = Claims(tmp_path, "one")
    claims.take("a[0]", "digest", claims.look([("a[0]", "digest")])["a[0]"])
    claims.end("a[0]", 1, "stopped")
    folder = tmp_path / "claims"
    for name in (".a[0].1.77.tmp", ".a[0].2.77.tmp", ".a[0].b.1.77.tmp", ".a0.1.77.tmp"):
        (folder / name).touch()
    assert claims.take("a[0]", "digest", claims.look([("a[0]", "digest")])["a[0]"]) == 2
    left = {path.name for path in folder.glob(".*")}
    assert left == {".a[0].2.77.tmp", ".a[0].b.1.77.tmp", ".a0.1.77.tmp"}


def test_a_late_ending_of_one_that_seemed_dead_still_counts(tmp_path):
    slow, quick = Claims(tmp_path, "slow"), Claims(tmp_path, "quick")
    assert slow.take("lr=0.0", "digest", state_of(slow)) == 1
    path = tmp_path / "claims" / "lr=0.0.1"
    path.write_text(json.dumps({**json.loads(path.read_text()), "node": "elsewhere"}))
    age(path, LEASE + 5)
    assert quick.take("lr=0.0", "digest", state_of(quick)) == 2
    quick.end("lr=0.0", 2, "busy")  # the run folder's lock was still held
    slow.end("lr=0.0", 1, "finished")
    assert state_of(Claims(tmp_path, "third")).claim.ending == "finished"


def test_a_recipe_that_has_changed_is_not_done(tmp_path):
    claims = Claims(tmp_path, "one")
    claims.take("lr=0.0", "digest", state_of(claims))
    claims.end("lr=0.0", 1, "finished")
    assert state_of(claims).decided
    assert claims.look([("lr=0.0", "more rounds")])["lr=0.0"].open
    assert [claim["ending"] for claim in read_claims(tmp_path)["lr=0.0"]] == ["finished"]


def test_errors_of_the_file_server_hide_no_successor_of_a_claim(tmp_path, monkeypatch):
    monkeypatch.setattr("hpcfed.lab.sweep.claims.BEAT", 0.02)
    exists, failed, said = Path.exists, threading.Event(), threading.Event()

    def stale_once(path: Path, **options: bool) -> bool:
        if path.name == "lr=0.0.2" and not failed.is_set():
            failed.set()
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return exists(path, **options)

    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    claims = Claims(tmp_path, "slow")
    number = claims.take("lr=0.0", "digest", state_of(claims))
    monkeypatch.setattr(Path, "exists", stale_once)
    monkeypatch.setattr("hpcfed.lab.sweep.claims.os.utime", refused)
    with claims.held("lr=0.0", number, lambda code, message: said.set()):
        assert failed.wait(30)
        (tmp_path / "claims" / "lr=0.0.2").write_text("")
        assert said.wait(30)


@pytest.mark.soak
def test_one_that_has_been_succeeded_ends_its_job(tmp_path):
    said: list[tuple[int, str]] = []
    slow = Claims(tmp_path, "slow")
    number = slow.take("lr=0.0", "digest", state_of(slow))
    with slow.held("lr=0.0", number, lambda code, message: said.append((code, message))):
        (tmp_path / "claims" / "lr=0.0.2").write_text("")
        deadline = time.monotonic() + 30
        while not said and time.monotonic() < deadline:
            time.sleep(0.1)
    assert said[0][0] == 4
    assert "another job has taken it over" in said[0][1]
