"""The harness itself: what one rank does to a session of three (see tests/conftest.py)."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from textwrap import dedent

import pytest

from tests.launch import ROOT, Completed, Overtime, launch, own_lines

pytest.importorskip("mpi4py", reason="needs mpi4py", exc_type=ImportError)

PROMPT = 40
"""Seconds, of which starting three ranks takes most where others work on the machine; a test's deadline is 2 here."""
CLOSING = re.compile(r"^=+ .*\d+ (?:passed|failed|skipped|deselected).* in [\d.]+s.* =+$", re.MULTILINE)


@pytest.fixture
def session(tmp_path):
    """Run pytest with this suite's conftest on a test file of this body; 3 ranks by default."""

    def run(body: str, *, ranks: int = 3, folder: str = "mpi", ci: str = "", deadline: float = 45) -> Completed:
        shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        test = tmp_path / folder / "test_it.py"
        test.parent.mkdir(exist_ok=True)
        test.write_text("import os, time, pytest\nfrom pathlib import Path\n" + dedent(body))
        return launch(
            ranks,
            ["--with-mpi", "--color=no", "--no-header", "--rootdir", tmp_path, "-p", "no:cacheprovider", tmp_path],
            program=("-m", "mpi4py", "-m", "pytest"),
            env={"CI": ci, "MPI_TEST_DEADLINE": str(deadline)},
            cwd=tmp_path,
        )

    return run


@pytest.mark.soak
def test_passing_session_has_one_closing_line(session):
    done = session("def test_it(comm): assert comm.allreduce(1) == 3")
    assert done.returncode == 0, done
    assert len(CLOSING.findall(done.stdout)) == 1
    assert "1 passed" in done.stdout


def test_several_ranks_run_what_takes_ranks_and_is_not_alike_and_some_of_each_kind(session):
    done = session("""
        def test_without(tmp_path): pass
        @pytest.mark.alike
        def test_alike(comm): pass
        @pytest.mark.parametrize("n", range(8))
        @pytest.mark.thinned
        def test_many(comm, n): assert n % 4 == 1
        @pytest.mark.parametrize("n", [pytest.param(-1, marks=pytest.mark.soak), *range(7)])
        @pytest.mark.every(3)
        def test_some(comm, n): assert n % 3 == 0
        """)
    assert done.returncode == 0, done
    assert "5 passed, 13 deselected" in done.stdout


@pytest.mark.parametrize(
    "phase", ["call", pytest.param("setup", marks=pytest.mark.soak), pytest.param("teardown", marks=pytest.mark.soak)]
)
def test_failure_on_one_rank_fails_all_and_names_it(session, phase):
    done = session(f"""
        def boom(comm, phase):
            if comm.rank == 2 and phase == {phase!r}: raise ValueError("only here")
        @pytest.fixture
        def thing(comm):
            boom(comm, "setup")
            yield
            boom(comm, "teardown")
        def test_it(comm, thing): boom(comm, "call")
        def test_next(comm): assert comm.allreduce(1) == 3
        """)
    counts = {"setup": "1 passed, 1 error", "call": "1 failed, 1 passed", "teardown": "2 passed, 1 error"}
    assert done.returncode == 1, done
    assert "--- rank 2 of 3 ---" in done.stdout
    assert "ValueError: only here" in done.stdout
    assert "--- rank 0" not in done.stdout
    assert counts[phase] in done.stdout
    assert len(CLOSING.findall(done.stdout)) == 1


def test_collective_of_a_failed_test_does_not_pair_with_the_next(session):
    """Rank 1 fails before a broadcast that rank 0, its root, need not wait for."""
    done = session("""
        def test_first(comm):
            if comm.rank == 1: raise ValueError("before the broadcast")
            if comm.rank == 0: comm.send("stray", dest=1)
        def test_next(comm):
            got = comm.sendrecv(comm.rank, dest=(comm.rank + 1) % 3, source=(comm.rank - 1) % 3)
            assert got == (comm.rank - 1) % 3
        """)
    assert done.returncode == 1, done
    assert "1 failed, 1 passed" in done.stdout


def ended(done: Completed) -> bool:
    """Whether `STUCK` ended it: Hydra may give the signal by which it ends the others, 9, in place of that code."""
    return done.returncode == 97 or (done.returncode == 9 and ", 97) - process" in done.stderr)


@pytest.mark.soak
def test_collective_that_a_failed_rank_never_enters_ends_the_session(session):
    done = session(
        """
        def test_it(comm):
            if comm.rank == 1: raise ValueError("before the barrier")
            comm.Barrier()
        def test_next(comm): assert comm.allreduce(1) == 3
        """,
        deadline=2,
    )
    assert ended(done), done
    assert done.seconds < PROMPT
    said = "\n".join(own_lines(done.stderr))
    assert "rank 1: mpi/test_it.py::test_it (call): ranks [0, 2] did not finish it within 2 s" in said
    assert "rank 1: E       ValueError: before the barrier" in said
    assert "rank 0:     comm.Barrier()" in said
    assert not CLOSING.findall(done.stdout)


def test_hanging_rank_ends_the_session(session):
    done = session("def test_it(comm):\n    while comm.rank == 2: time.sleep(0.1)", deadline=2)
    assert ended(done), done
    assert done.seconds < PROMPT
    assert "rank 0: mpi/test_it.py::test_it (call): ranks [2] did not finish it within 2 s" in done.stderr
    assert "rank 2: mpi/test_it.py::test_it (call): not finished within 2 s; this rank is here:" in done.stderr


@pytest.mark.soak
def test_hang_of_all_ranks_and_in_teardown_ends_the_session(session):
    done = session(
        """
        @pytest.fixture
        def thing(comm):
            yield
            comm.recv(source=(comm.rank + 1) % 3)
        def test_it(thing): pass
        """,
        deadline=2,
    )
    assert ended(done), done
    for rank in range(3):
        assert f"rank {rank}: mpi/test_it.py::test_it (teardown): not finished within 2 s" in done.stderr


@pytest.mark.soak
def test_hang_that_keeps_the_interpreters_lock_ends_the_session(session):
    done = session("import ctypes\ndef test_it(comm): ctypes.PyDLL(None).sleep(60)", deadline=2)
    assert done.returncode != 0, done
    assert done.seconds < PROMPT
    assert "in test_it" in done.stderr


@pytest.mark.soak
def test_hang_without_ranks_ends_the_session(session):
    done = session("def test_it(): time.sleep(60)", ranks=0, deadline=2)
    assert ended(done), done
    assert "rank 0: mpi/test_it.py::test_it (call): not finished within 2 s" in done.stderr


@pytest.mark.soak
def test_skips_must_agree(session):
    done = session("""
        def test_it(comm):
            if comm.rank == 1: pytest.skip("not on this rank")
        def test_everywhere(comm): pytest.skip("not on any rank")
        """)
    assert done.returncode == 1, done
    assert "ranks disagree on the outcome" in done.stdout
    assert "rank 1 skipped not on this rank" in done.stdout
    assert "1 failed, 1 skipped" in done.stdout


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.soak), 3])
def test_skip_is_a_failure_on_ci_unless_it_needs_more_ranks(session, ranks):
    body = """
        def test_absent(comm): pytest.skip("needs a thing that is absent")
        @pytest.mark.ranks(4)
        def test_wide(comm): pass
        @pytest.mark.mpi(min_size=4)
        def test_wide_in_words_of_pytest_mpi(comm): pass
        @pytest.mark.xfail(raises=ValueError)
        def test_known(comm): raise ValueError
        """
    here = session(body, ranks=ranks)
    assert here.returncode == 0, here
    assert "3 skipped, 1 xfailed" in here.stdout
    on_ci = session(body, ranks=ranks, ci="true")
    assert on_ci.returncode == 1, on_ci
    assert "skipped, which CI does not allow: needs a thing that is absent" in on_ci.stdout
    assert "1 failed, 2 skipped, 1 xfailed" in on_ci.stdout


@pytest.mark.soak
def test_skipped_module_is_a_failure_on_ci(session):
    body = 'pytest.skip("needs a thing that is absent", allow_module_level=True)'
    assert session(body).returncode == 5
    on_ci = session(body, ci="true")
    assert on_ci.returncode not in (0, 5), on_ci
    assert "which CI does not allow" in on_ci.stdout


@pytest.mark.soak
def test_error_of_collection_on_one_rank_ends_the_session(session):
    done = session("""
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 1: raise ValueError("only here")
        def test_it(): pass
        """)
    assert done.returncode == 3, done
    assert "rank 1: mpi/test_it.py" in done.stdout
    assert "ValueError: only here" in done.stdout


@pytest.mark.soak
def test_different_tests_on_one_rank_end_the_session(session):
    done = session("""
        from mpi4py import MPI
        @pytest.mark.parametrize("n", range(1 + MPI.COMM_WORLD.rank))
        def test_it(n, comm): pass
        """)
    assert done.returncode == 3, done
    assert "ranks 0 and 1 collected different tests: ['mpi/test_it.py::test_it[1]']" in done.stdout


@pytest.mark.soak
def test_serial_tests_run_in_a_world_of_one_only(session):
    body = "def test_it(): pass"
    assert "1 passed" in session(body, ranks=0, folder="cli").stdout
    assert "no tests ran" in session(body, folder="cli").stdout


@pytest.mark.soak
def test_shared_tmp_is_one_empty_folder(session):
    done = session("""
        def test_it(shared_tmp, comm):
            (shared_tmp / str(comm.rank)).touch()
            comm.Barrier()
            assert sorted(path.name for path in shared_tmp.iterdir()) == ["0", "1", "2"]
        """)
    assert done.returncode == 0, done


@pytest.mark.soak
def test_launch_kills_what_is_over_time(tmp_path):
    script = tmp_path / "sleep.py"
    script.write_text(
        f"import os, time, pathlib\npathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\ntime.sleep(600)"
    )
    with pytest.raises(Overtime, match=r"(?s)not done after 3 s: .*mpirun.*most recent call first"):
        launch(2, [], program=(str(script),), timeout=3)
    started = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(started) == 2
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    "ending",
    ["sys.exit(2)", "os.kill(os.getpid(), 11)", pytest.param("MPI.COMM_WORLD.Abort(4)", marks=pytest.mark.soak)],
)
def test_own_lines_leaves_out_what_launchers_say(tmp_path, ending):
    script = tmp_path / "end.py"
    script.write_text(
        "import os, sys, time\nfrom mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 0: print('hpcfed: one line; do this', file=sys.stderr, flush=True)\n"
        f"MPI.COMM_WORLD.Barrier()\ntime.sleep(0.5)\n{ending}\n"
    )
    done = launch(2, [], program=("-m", "mpi4py", str(script)), env={"PYTHONFAULTHANDLER": ""})
    assert done.returncode != 0
    assert own_lines(done.stderr) == ["hpcfed: one line; do this"]
