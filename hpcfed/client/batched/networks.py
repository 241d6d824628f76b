"""The stacked network of a module: what it is read as."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcfed.client.batched.gradients import Perceptron
from hpcfed.client.batched.matmul import Blas
from hpcfed.client.batched.operators.base import Operator
from hpcfed.client.batched.operators.build import Operators, best_format, operators_of, simplified
from hpcfed.client.batched.operators.check import check
from hpcfed.client.batched.operators.layers import Linear
from hpcfed.client.batched.operators.network import OperatorNetwork
from hpcfed.client.batched.operators.plain import Relu, Reshape
from hpcfed.models.flat import FlatModel
from hpcfed.models.losses import Loss
from hpcfed.models.reading.program import Program, Unreadable
from hpcfed.models.reading.recorder import record

FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
"""By the recipe's name."""
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Functions of torch that are a whole layer, of which nothing is gained by reading it."""


def network_of(
    model: FlatModel, loss: Loss, x: Tensor, batch: int, matmul: Blas, memory_format: str = "auto"
) -> Perceptron | OperatorNetwork:
    """Return the network of a model that can be read, compared with the module in float64.

    Args:
        model: in training mode; afterwards as it was.
        loss: of training.
        x: one sample, (1, …).
        batch: samples of a minibatch.
        matmul: what computes products.
        memory_format: the recipe's ``local.memory_format``.

    Raises:
        Unreadable: why it cannot be read.
        InputError: its calls do what no engine can train.
    """
    sizes = {name: view.shape for name, view in model.trained_views(model.trained).items()}
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and name not in sizes:
            raise Unreadable(f"a call makes the parameter {name}")
    initial = model.trained_grad.copy_(model.trained)  # whose memory is there: new pages take time
    model.forget()
    try:
        program = record(model.module, x)
        _refuse_recurrent(program)
        simple = simplified(program)
        found = check(model.module, program, simple, x, batch)
        model.check_buffers()
    finally:
        model.load(model.vector)
        model.trained.copy_(initial)
        initial.zero_()
        model.forget()
    named = (*model.module.named_parameters(), *model.module.named_buffers())
    constants = {name: tensor.detach() for name, tensor in named if name not in sizes}
    on_cpu = model.vector.device.type == "cpu"
    chosen = FORMATS[memory_format] if memory_format != "auto" else best_format(simple) if on_cpu else None
    operators = operators_of(simple, sizes, constants, memory_format=chosen)
    places = _perceptron(operators, list(sizes.values()))
    if places is not None and loss.inverse_link is not None:
        return Perceptron(places, list(sizes.values())[places[-1][0]][0], loss, matmul)
    network = OperatorNetwork(operators, loss, matmul, mixes=found.mixes)
    network.memory_format = next((name for name, one in FORMATS.items() if one == chosen), memory_format)
    network.by_slot = network.by_slot and found.by_slot
    return network


def _refuse_recurrent(program: Program) -> None:
    for call in program.calls:
        if call.name in RECURRENT:
            raise Unreadable(f"torch's own {call.name.upper()} has all steps in one kernel", call.place)


def _perceptron(operators: Operators, sizes: Sequence[torch.Size]) -> list[tuple[int, int | None]] | None:
    """Return the places of each layer's parameters, if these are linear layers with ReLU between them, on samples whose
    numbers are in their order; else None.
    """
    found: list[tuple[int, int | None]] = []
    current, before = 0, Operator
    for operator in operators.each:
        if operator.inputs != (current,):
            return None
        if isinstance(operator, Linear) and before is not Linear:
            found.append((operator.weight, operator.bias))
        elif isinstance(operator, Relu):
            if before is not Linear:
                return None
        elif found or not isinstance(operator, Reshape):
            return None
        before, current = type(operator), operator.outputs[0]
    used = [place for layer in found for place in layer if place is not None]
    is_whole = sorted(used) == list(range(len(sizes))) and operators.output == current
    return found if is_whole and before is Linear and operators.output_axes == 2 else None
