"""MKL's vector functions are called once before a run's threads may meet in a first call."""

import re
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

import hpcfed
from hpcfed.arithmetic.first_calls import FUNCTIONS
from hpcfed.ranks.world import World
from tests.mpi.recipes import small, write_small


class Called(TorchFunctionMode):
    """Notes which functions of torch are called, and with tensors of which type."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            self.seen.add((getattr(func, "__name__", ""), args[0].dtype))
        return func(*args, **(kwargs or {}))


@pytest.mark.serial
def test_a_run_makes_every_first_call(tmp_path: Path):
    recipe = small(tmp_path / "run", data=str(write_small(tmp_path)), threads=2, rounds=1)
    with Called() as called:
        run = hpcfed.run(recipe, world=World(), quiet=True)
    missed = {(function, dtype) for function in FUNCTIONS for dtype in (torch.float32, torch.float64)} - called.seen
    assert not missed
    assert '"bitwise": true' in (run.folder / "environment.json").read_text()


@pytest.mark.serial
def test_these_are_all_that_torch_takes_from_mkl():
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    names = {name.decode().lower() for name in re.findall(rb"\0vm[sd]([A-Z][A-Za-z0-9]*)(?=\0)", library.read_bytes())}
    taken = {"log" if name == "ln" else name for name in names}
    assert taken in (set(FUNCTIONS), set()), "a torch without MKL has none"
