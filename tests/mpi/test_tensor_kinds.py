"""Buffers of every dtype and parameters of every shape keep their values, in all roles, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hpcfed
from hpcfed.errors import InputError
from hpcfed.lab.export import export
from hpcfed.ranks.world import World
from tests.devices import KIND
from tests.mpi.recipes import small, write_small
from tests.mpi.tensor_kinds import VALUES, Buffered, Orthogonal, short
from tests.mpi.test_same_result import left_by
from tests.soak import often

pytestmark = [pytest.mark.one_mpi, pytest.mark.thinned]
HERE = str(Path(__file__).parent)
ROLES = [None, {"buffers": "averaged"}, {"private": ["table"]}, {"frozen": ["table"]}]
OF_CLIENTS = {"every": 0, "clients": {"every": 1}}
OF_RUN = {
    torch.complex32: torch.complex64,
    torch.complex128: torch.complex64,
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn), torch.float32),
}
"""What a dtype becomes in a run of float32; others stay."""
OFTEN = [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.complex128]
OFTEN += [torch.int8, torch.int64, torch.uint8, torch.uint64, torch.bool]
"""Dtypes of each kind: those that become others in a run, and of whole numbers the smallest and the largest."""
SPARSE = pytest.mark.skipif(KIND == "stub", reason="the strict device has no sparse tensors")


@pytest.fixture
def folder(world, shared_tmp, monkeypatch) -> Path:
    world.on_root(lambda: write_small(shared_tmp))
    monkeypatch.chdir(shared_tmp)
    return shared_tmp


def recipe(output: str, name: str, *, args: Any = None, **changes: Any) -> dict[str, Any]:
    model = {"factory": f"tensor_kinds:{name}", "args": args or {}}
    if any("private" in key for key in changes.get("parameters", {})):
        changes["evaluate"] = OF_CLIENTS
    return small(output, model=model, python_path=[HERE], **changes)


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", often(OFTEN, VALUES), ids=short)
def test_a_buffer_keeps_its_values_in_every_role(dtype, world, folder):
    kept = Buffered(short(dtype)).table.to(OF_RUN.get(dtype, dtype))
    for number, parameters in enumerate(ROLES):
        changes = {"rounds": 1} if parameters is None else {"rounds": 1, "parameters": parameters}
        run = hpcfed.run(recipe(f"run-{number}", "Buffered", args={"dtype": short(dtype)}, **changes), world=world)
        assert run.module.table.dtype == kept.dtype
        assert torch.equal(run.module.table, kept)
        file = load_file(run.folder / "model.safetensors")
        if parameters in (ROLES[1], ROLES[3]):
            assert torch.equal(file["table"], kept)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "dtype", often(OFTEN, [one for one in VALUES if one not in OF_RUN or one == torch.complex64]), ids=short
)
def test_a_buffer_that_counts_is_averaged_or_its_clients(dtype, world, folder):
    """Each step adds 1: a mean of the same numbers, or their maximum, of a boolean likewise; refused without a role."""
    args, counted = {"dtype": short(dtype), "counts": True}, {"algorithm": {"name": "fedavg"}, "rounds": 2}
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        return  # torch does not add them
    with pytest.raises(InputError, match="'table', which would carry"):
        hpcfed.run(recipe("none", "Buffered", args=args, **counted), world=world, quiet=True)
    base = recipe("run", "Buffered", args=args, parameters={"buffers": "averaged"}, **counted)
    run = hpcfed.run(base, world=world, quiet=True)
    if world.rank == world.size - 1:
        alone = hpcfed.run({**base, "output": "alone"}, world=World(), quiet=True)
        assert left_by(run) == left_by(alone)
    before = torch.tensor(VALUES[dtype])
    wanted = before | True if dtype == torch.bool else before + 8
    torch.testing.assert_close(run.module.table.to(wanted.dtype), wanted)
    private = recipe("own", "Buffered", args=args, parameters={"private": ["table"]}, **counted)
    own = load_file(hpcfed.run(private, world=world).folder / "private" / "client-0.safetensors")["table"]
    torch.testing.assert_close(own.to(wanted.dtype), wanted)


def test_what_a_run_cannot_keep_is_named(world, folder, capfd):
    for name, args, says in (
        ("Complex", {}, "parameter 'phase': expected real numbers, got torch.complex64"),
        ("Complex", {"frozen": True}, "parameter 'phase': expected real numbers"),
        ("Large", {"value": 1e300}, r"buffer 'bound' does not fit dtype: float32: expected .*, got 1e\+300"),
    ):
        with pytest.raises(InputError, match=says):
            hpcfed.run(recipe("run", name, args=args), world=world, quiet=True)
    averaged = {"parameters": {"buffers": "averaged"}, "dtype": "float64"}
    with pytest.raises(InputError, match="'table' in complex128 cannot be in a model's file"):
        hpcfed.run(recipe("run", "Buffered", args={"dtype": "complex64"}, **averaged), world=world, quiet=True)
    capfd.readouterr()
    hpcfed.run(recipe("rounded", "Large", args={"value": 0.1}, rounds=1), world=world)
    said = "".join(capfd.readouterr())
    if world.rank == 0:
        assert "the model's buffer bound: rounded to float32, as all of the model is; dtype: float64" in said


@SPARSE
def test_missing_numbers_and_sparse_buffers_are_constant(world, folder):
    for output, name, args in (
        ("missing", "Buffered", {"dtype": "float32", "missing": True}),
        ("sparse", "Sparse", {}),
    ):
        run = hpcfed.run(recipe(output, name, args=args), world=world, quiet=True)
        assert run.metrics[-1]["test_loss"] < run.metrics[0]["test_loss"]


@pytest.mark.every(2)
@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_parameter_without_dimensions_is_one_of_a_single_number(engine, world, folder):
    local = {"steps": 4, "batch_size": 10, "lr": 0.1, "engine": engine, "momentum": 0.5}
    runs = [
        hpcfed.run(recipe(f"run-{len(shape)}", "Scaled", args={"shape": shape}, local=local), world=world, quiet=True)
        for shape in ([], [1])
    ]
    scalar, vector = (load_file(run.folder / "model.safetensors")["log_scale"] for run in runs)
    assert (scalar.shape, vector.shape) == ((), (1,))
    assert float(scalar) == float(vector[0]) != 0.7
    if world.rank == 0 and engine == "sequential":
        assert hpcfed.replay(runs[0].folder, 2, 1).agrees


@pytest.mark.every(2)
@pytest.mark.parametrize("parameters", [{"private": ["log_scale"]}, {"frozen": ["log_scale"]}])
def test_one_without_dimensions_has_any_role(parameters, world, folder):
    base = recipe("run", "Scaled", parameters=parameters, cohort={"size": 3})
    run = hpcfed.run(base, world=world, quiet=True)
    if world.rank == world.size - 1:
        alone = hpcfed.run({**base, "output": "alone"}, world=World(), quiet=True)
        assert left_by(run) == left_by(alone)


@SPARSE
def test_every_module_that_trains_is_exported(world, folder):
    """Buffers that are transposed or expanded, scalars and complex ones; what no file holds is named."""
    run = hpcfed.run(recipe("run", "Orthogonal", rounds=1), world=world, quiet=True)
    hpcfed.run(recipe("complex", "Buffered", args={"dtype": "complex64"}, rounds=1), world=world, quiet=True)
    sparse = hpcfed.run(recipe("sparse", "Sparse", rounds=1), world=world, quiet=True)
    if world.rank:
        return
    for output in ("run", "complex"):
        export(Path(output), output=Path(f"{output}.safetensors"))
    state = load_file("run.safetensors")
    fresh = Orthogonal()
    fresh.load_state_dict(state)
    x = torch.randn(3, 12)
    assert torch.equal(fresh.eval()(x), run.module(x))
    with pytest.raises(InputError, match="safetensors has no place for edges"):
        export(sparse.folder, output=Path("other.safetensors"))
