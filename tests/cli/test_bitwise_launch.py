"""The same bits from jobs of 1, 2, 3, 4 and 7 ranks, for every method: more ranks than clients included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import launch
from tests.mpi.recipes import METHODS, write_recipe, write_small

ALL_METHODS = """
import sys
import hpcfed
for method in sys.argv[1:]:
    for model in ("last", "client-average"):
        hpcfed.run(f"{method}.yaml", [f"evaluate.model={model}", f"output={method}-{model}"], quiet=True)
"""


def run_all(folder: Path, ranks: int) -> dict[str, bytes]:
    """Run all methods on 5 clients in one job; return the bytes of every model it left."""
    folder.mkdir()
    write_small(folder)
    for name in METHODS:
        local = {"batch_size": 10, "lr": 0.1, "momentum": 0.5}
        budget, algorithm = {"low": 1, "high": 6}, {"name": name, **METHODS[name]}
        write_recipe(folder, f"{name}.yaml", algorithm=algorithm, local=local, budget=budget, cohort={"size": 4})
    done = launch(ranks, list(METHODS), program=("-m", "mpi4py", "-c", ALL_METHODS), cwd=folder, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.soak
@pytest.mark.one_mpi
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_models_have_the_same_bits_on_any_number_of_ranks(ranks, tmp_path):
    """Beside those of a process of its own; tests/mpi/test_same_result.py compares with a world of one."""
    alone, models = run_all(tmp_path / "alone", 0), run_all(tmp_path / "job", ranks)
    assert len(models) == 3 * len(METHODS)  # last and client-average runs, and the latter's evaluated model
    assert len(set(models.values())) == 2 * len(METHODS)  # no method is another by mistake; both runs train alike
    assert [name for name in models if models[name] != alone[name]] == []
