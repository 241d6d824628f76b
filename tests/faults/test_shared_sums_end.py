"""A rank that ends while others wait for its part of the sums in shared memory ends the job."""

from __future__ import annotations

import pytest

from hpcfed.errors import EnvironmentFailure
from tests.launch import launch, own_line
from tests.mpi.recipes import write_recipe, write_small

ENDS = """
import os, signal, sys
from hpcfed.cli.main import main
from hpcfed.errors import EnvironmentFailure
from hpcfed.ranks.world import connect
from hpcfed.reduce import memory

memory.SHARED_BYTES = 1
ending, world, met = sys.argv.pop(), connect(), []
meet = type(world).barrier

def barrier(self):
    met.append(None)
    if len(met) == 4 and world.rank == world.size - 1:  # the second round's, after the sums of its slice
        if ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise EnvironmentFailure("this rank can no more")
    meet(self)

type(world).barrier = barrier
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.every(2)
@pytest.mark.parametrize("ending", ["killed", "failed"])
def test_a_rank_that_ends_while_others_wait_for_it_ends_the_job(ending, tmp_path):
    write_small(tmp_path)
    write_recipe(tmp_path)
    done = launch(
        2, ["run", "-q", "recipe.yaml", ending], program=("-m", "mpi4py", "-c", ENDS), cwd=tmp_path, timeout=60
    )
    assert done.returncode != 0
    if ending == "failed":
        assert done.returncode == EnvironmentFailure.exit_code
        assert "this rank can no more" in own_line(done.stderr)
