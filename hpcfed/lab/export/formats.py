"""The files of an exported model: tensors by name, or a TorchScript program. Reading them runs no pickled code.

safetensors   all parameters and buffers by the module's names
state_dict    the same, written by ``torch.save``; ``torch.load(…, weights_only=True)`` reads it
torchscript   the module traced in evaluation mode; refused unless its predictions equal the module's bit for bit
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from hpcfed.data.federation import Federation
from hpcfed.data.shards import Shards
from hpcfed.errors import RAISED, InputError, in_a_line
from hpcfed.lab.loaded import LoadedRun
from hpcfed.run_folder.contents import PRIVATE
from hpcfed.run_folder.files import INITIAL, private_file

FORMATS = {"safetensors": ".safetensors", "state_dict": ".pt", "torchscript": ".torchscript.pt"}
"""Format → suffix of its files."""
SIZES = (2, 1, 5, 2)
"""Sizes of the batches on which a traced module is compared with the original."""


def content_of(loaded: LoadedRun, kind: str, client: int | None) -> bytes:
    """Return the bytes of a file with a run's evaluated model; `kind` is a key of `FORMATS`.

    The file has the private parameters and buffers of `client`, or none if `client` is None.

    Raises:
        InputError: no model is trained yet; the format cannot hold the model; the module cannot be traced, or its trace
            predicts other values; or `kind` is ``torchscript``, the module has private parts, and `client` is None.
    """
    module = loaded.evaluated if client is None else loaded.evaluated_of(client)
    private = private_names(loaded) if client is None else frozenset()
    if kind == "torchscript":
        if private:
            what = f"--format torchscript: {len(private)} tensors of the model are each client's own"
            raise InputError(what, where=str(loaded.folder), remedy="name a client by --site, or choose another format")
        return _traced(module, list(_batches(loaded)), str(loaded.folder))
    kept = {name: tensor for name, tensor in module.state_dict().items() if name not in private}
    tensors = {name: _copied(tensor) if isinstance(tensor, Tensor) else tensor for name, tensor in kept.items()}
    if kind == "safetensors":
        if others := [name for name, one in tensors.items() if not isinstance(one, Tensor)]:
            what = f"--format safetensors has no place for {', '.join(others[:4])}, which is no tensor"
            raise InputError(what, where=str(loaded.folder), remedy="choose --format state_dict")
        try:
            return save(tensors, metadata={"format": "pt"})
        except (KeyError, ValueError, SafetensorError):
            odd = [f"{name} in {one.dtype}" for name, one in tensors.items() if _is_unknown(one)]
            what = f"--format safetensors has no place for {', '.join(odd[:4]) or 'a tensor of this model'}"
            raise InputError(what, where=str(loaded.folder), remedy="choose --format state_dict") from None
    file = io.BytesIO()
    torch.save(tensors, file)
    return file.getvalue()


def _copied(tensor: Tensor) -> Tensor:
    """Return a contiguous copy that shares no memory with other tensors: a file has neither strides nor aliases."""
    return tensor.clone() if tensor.layout != torch.strided else tensor.clone(memory_format=torch.contiguous_format)


def _is_unknown(tensor: Tensor) -> bool:
    """Whether a safetensors file cannot hold a tensor."""
    try:
        save({"tensor": tensor})
    except (KeyError, ValueError, SafetensorError):
        return True
    return False


def private_names(loaded: LoadedRun) -> frozenset[str]:
    """Return the names of the private parameters and buffers; empty if there are none."""
    path = loaded.folder / INITIAL
    if not path.exists():
        return frozenset()
    with safe_open(path, framework="pt") as file:
        return frozenset(file.keys())


def why_initial(loaded: LoadedRun, client: int, num_samples: int) -> str:
    """Return why the private parts, or the personal model, of a client with so many training samples have their initial
    values; "" if they are trained."""
    if not (loaded.folder / PRIVATE).is_dir():
        return ""
    if not (loaded.folder / private_file(client)).exists():
        return "was never drawn"
    return "" if num_samples else "has no training samples"


def _batches(loaded: LoadedRun) -> Iterator[Tensor]:
    """Yield batches of `SIZES` samples of the largest client, prepared as in the run."""
    with Federation.open(loaded.recipe.data) as federation:
        shards = Shards(federation, getattr(torch, loaded.recipe.dtype), torch.device("cpu"), capacity=0)
        fullest = int(federation.sizes.argmax())
        x = shards.client(fullest)[0]
    yield from (x[:size].clone() for size in SIZES)


def _traced(module: nn.Module, batches: list[Tensor], where: str) -> bytes:
    """Return a module as the bytes of a TorchScript program that predicts the same on `batches`, bit for bit.

    Raises:
        InputError: the module cannot be traced, or the program predicts other values.
    """
    remedy = "choose another --format"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch, on deprecation and on constants, which the comparison below finds
        try:
            program = torch.jit.trace(module, batches[0], check_trace=False)
            file = io.BytesIO()
            torch.jit.save(program, file)
            again = torch.jit.load(io.BytesIO(file.getvalue()))
            same = all(torch.equal(again(x), module(x)) for x in batches)
        except RAISED as error:  # a user's module may raise anything
            what = "--format torchscript: the module cannot be traced"
            raise InputError(what, where=where, got=in_a_line(error)[:200], remedy=remedy) from error
    if not same:
        what = "--format torchscript: the traced module predicts other values"
        raise InputError(f"{what}, since it depends on more than its input's shape", where=where, remedy=remedy)
    return file.getvalue()
