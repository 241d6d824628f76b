"""Modules that change their own parameters in ways of published code: beside memory of their own, and their twins that
write in place. `ADOPTED` must train as the twin does, `REFUSED` must be refused by a name.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize, prune


def limited(weight: Tensor, most: float = 0.4) -> Tensor:
    """Rows of a norm up to `most`, as EEGNet constrains its layers."""
    return torch.renorm(weight.detach(), 2, 0, most)


class Net(nn.Module):
    """A perceptron whose `change` is called in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(12, 8), nn.Linear(8, 4)

    def change(self) -> None:
        """Change the parameters."""

    def forward(self, input: Tensor) -> Tensor:
        self.change()
        return self.head(torch.tanh(self.first(input)))


class InPlace(Net):
    def change(self) -> None:
        with torch.no_grad():
            self.first.weight.copy_(limited(self.first.weight))


class Assigned(Net):
    def change(self) -> None:
        self.first.weight.data = limited(self.first.weight)


class Transposed(Net):
    def change(self) -> None:
        self.first.weight.data = limited(self.first.weight).t().contiguous().t()


class SetInto(Net):
    def change(self) -> None:
        with torch.no_grad():
            self.first.weight.set_(limited(self.first.weight))


class InTraining(Net):
    def change(self) -> None:
        if self.training:
            self.first.weight.data = limited(self.first.weight)


class InPlaceInTraining(Net):
    def change(self) -> None:
        if self.training:
            self.first.weight.data.copy_(limited(self.first.weight))


class InEvaluation(Net):
    """Scales its weights again with each call in evaluation, which the next unit must not see."""

    def change(self) -> None:
        if not self.training:
            self.first.weight.data = 0.9 * self.first.weight.data


class InPlaceInEvaluation(Net):
    def change(self) -> None:
        if not self.training:
            self.first.weight.data.mul_(0.9)


class Sometimes(Net):
    """Constrains every third call in training, of those of a client; the count is a tensor, which begins anew."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def change(self) -> None:
        self.calls += 1
        if self.training and self.calls % 3 == 0:
            self.assign()

    def assign(self) -> None:
        self.first.weight.data = limited(self.first.weight)


class InPlaceSometimes(Sometimes):
    def assign(self) -> None:
        self.first.weight.data.copy_(limited(self.first.weight))


class ByHook(Net):
    """A forward pre-hook of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_pre_hook(self.constrain)

    @staticmethod
    def constrain(layer: nn.Module, _: object) -> None:
        layer.weight.data = limited(layer.weight)


class AfterForward(Net):
    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        self.head.bias.data = self.head.bias.data.clamp(-0.05, 0.05)
        return output


class InPlaceAfterForward(Net):
    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        self.head.bias.data.clamp_(-0.05, 0.05)
        return output


class Flattened(Net):
    """All of a layer's parameters in one new block of memory, as ``flatten_parameters`` does under cuDNN."""

    def change(self) -> None:
        own = [self.first.weight, self.first.bias]
        block = torch.cat([parameter.detach().flatten() for parameter in own])
        for parameter, piece in zip(own, block.split([parameter.numel() for parameter in own]), strict=True):
            parameter.data = piece.view_as(parameter)


class Ternary(Net):
    """Binary weights in the forward pass, the real ones put back behind it, as BinaryConnect keeps them."""

    def forward(self, input: Tensor) -> Tensor:
        real = self.first.weight.data
        self.first.weight.data = real.sign() * 0.1
        output = super().forward(input)
        self.first.weight.data = real
        return output


class InPlaceTernary(Net):
    def forward(self, input: Tensor) -> Tensor:
        real = self.first.weight.data.clone()
        self.first.weight.data.copy_(real.sign() * 0.1)
        output = super().forward(input)
        self.first.weight.data.copy_(real)
        return output


class Exchanged(Net):
    """The memory of two parameters changes places twice."""

    def change(self) -> None:
        one, other = self.first.bias.data, self.first.weight.data[:, 0].clone()
        self.first.bias.data = other
        self.first.bias.data = one.clone()


class Parametrized(Net):
    """A parametrization of torch's: its original is a parameter like others, and is assigned to in each call."""

    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.first, "weight", nn.Softplus())

    def change(self) -> None:
        original = self.first.parametrizations.weight.original
        original.data = original.data.clone()


class InPlaceParametrized(Parametrized):
    def change(self) -> None:
        """Leave it."""


class ModeAssigns(Net):
    """Assigns where the mode is set."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.first.weight.data = limited(self.first.weight)
        return self

    def change(self) -> None:
        self.first.weight.data.copy_(limited(self.first.weight))


class Adapter(nn.Module):
    """A linear layer with an adapter of low rank: ``eval`` merges it into the weight, ``train`` takes it out."""

    def __init__(self, *, assigns: bool, frozen: bool) -> None:
        super().__init__()
        self.layer, self.assigns, self.merged = nn.Linear(12, 4), assigns, False
        self.layer.weight.requires_grad_(not frozen)
        self.a, self.b = nn.Parameter(torch.randn(2, 12) / 4), nn.Parameter(torch.zeros(4, 2))

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        if self.merged == mode:
            sign, self.merged = (-1 if mode else 1), not mode
            added = sign * (self.b @ self.a).detach()
            if self.assigns:
                self.layer.weight.data = self.layer.weight.data + added
            else:
                self.layer.weight.data += added
        return self

    def forward(self, input: Tensor) -> Tensor:
        output = self.layer(input)
        return output if self.merged else output + input @ self.a.t() @ self.b.t()


class Unmerged(nn.Module):
    """The same function, never merged."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4)
        self.layer.weight.requires_grad_(not frozen)
        self.a, self.b = nn.Parameter(torch.randn(2, 12) / 4), nn.Parameter(torch.zeros(4, 2))

    def forward(self, input: Tensor) -> Tensor:
        return self.layer(input) + input @ self.a.t() @ self.b.t()


class Replaced(Net):
    def change(self) -> None:
        self.first.weight = nn.Parameter(limited(self.first.weight))


class ReplacedInTraining(Net):
    def change(self) -> None:
        if self.training:
            self.first.weight = nn.Parameter(limited(self.first.weight))


class ReplacedLayer(Net):
    def change(self) -> None:
        if self.training:
            self.head = copy.deepcopy(self.head)


class Late(Net):
    """Makes a layer in its first forward pass."""

    def forward(self, input: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = nn.Linear(4, 4, device=input.device)
        return self.late(super().forward(input))


class LateInTraining(Late):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.training else Net.forward(self, input)


class Removed(Net):
    def change(self) -> None:
        if self.training and self.head.bias is not None:
            self.head.bias = None


class Pruned(Net):
    def change(self) -> None:
        if self.training and not prune.is_pruned(self):
            prune.l1_unstructured(self.first, "weight", 0.5)


class Wider(Net):
    def change(self) -> None:
        if self.training:
            self.first.weight.data = torch.cat([self.first.weight.data] * 2)
            self.first.bias.data = torch.cat([self.first.bias.data] * 2)
            self.head.weight.data = torch.cat([self.head.weight.data] * 2, dim=1)


class Doubled(Net):
    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.head.double()
            return self.head(torch.tanh(self.first(input)).double()).float()
        return functional.linear(torch.tanh(self.first(input)), self.head.weight.float(), self.head.bias.float())


class NoGradients(Net):
    def change(self) -> None:
        self.zero_grad(set_to_none=True)


class OwnGradients(Net):
    """Clips its gradients itself once they are there."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_post_accumulate_grad_hook(self.clip)

    @staticmethod
    def clip(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clamp(-0.1, 0.1)


class FrozenDrift(Net):
    """Its frozen layer follows the trained one, as a teacher of an exponential average does."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(12, 8).requires_grad_(False)

    def change(self) -> None:
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.first.weight, 0.1)


class Unfreezes(Net):
    """Unfreezes its first layer after some calls, as gradual fine-tuning does."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.calls = torch.zeros(())

    def change(self) -> None:
        self.calls += 1
        if self.calls > 2:
            self.first.requires_grad_(True)


class Freezes(Net):
    def change(self) -> None:
        if self.training:
            self.first.weight.requires_grad_(False)


class Threads(Net):
    def change(self) -> None:
        torch.set_num_threads(2)


class Listed(nn.Module):
    """Keeps a layer in a list, which registers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = [nn.Linear(12, 8)], nn.Linear(8, 4)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layers[0](input)))


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = torch.randn(8, 12, requires_grad=True), nn.Linear(8, 4)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(torch.tanh(functional.linear(input, self.weight)))


class KeepsGraph(nn.Module):
    """A recurrent model that begins a minibatch with the state of the one before, not detached."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.state = nn.GRUCell(12, 8), nn.Linear(8, 4), None

    def forward(self, input: Tensor) -> Tensor:
        state = None if self.state is None else self.state.mean(0, keepdim=True).expand(len(input), 8)
        self.state = self.layer(input, state)
        return self.head(self.state)


class Backbone(Net):
    """Takes its features without gradients, and so never trains what makes them."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            features = torch.tanh(self.first(input))
        return self.head(features)


class Cache(Net):
    """Keeps a table as long as the longest minibatch, as rotary embeddings do, in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def change(self) -> None:
        self.table = torch.arange(float(self.table.numel() + 1))


class Cut(Net):
    """Its output has at most eight rows."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input[:8])


class Overwritten(Net):
    """Writes to a number that its gradient needs."""

    def forward(self, input: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.first(input))
        hidden += 1
        return self.head(hidden)


class FreshLayer(Net):
    """Makes a layer in each call."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.Linear(4, 4, device=input.device)(super().forward(input))


class Descending(Net):
    """Its output is of a gradient by the samples, as a Hamiltonian network's."""

    def by_hand(self, input: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(input))
        return ((1 - hidden.square()) * self.head.weight.sum(0)) @ self.first.weight

    def by_autograd(self, input: Tensor) -> Tensor:
        with torch.enable_grad():
            at = input.detach().requires_grad_()
            return torch.autograd.grad(super().forward(at).sum(), at, create_graph=True)[0]

    def forward(self, input: Tensor) -> Tensor:
        return self.by_autograd(input)[:, :4]


class DescendingByHand(Descending):
    def forward(self, input: Tensor) -> Tensor:
        return self.by_hand(input)[:, :4]


class Drawing(Net):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.others = torch.Generator(), [random.Random(0), np.random.default_rng(0)]

    def forward(self, input: Tensor) -> Tensor:
        factor = self.others[0].random() + self.others[1].random()
        noise = torch.randn(len(input), 4, generator=self.numbers, dtype=input.dtype).to(input.device)
        return super().forward(input) * factor + 0.1 * noise


class Extra(Net):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Leave it."""


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


ADOPTED: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "assigned": (Assigned, InPlace),
    "transposed": (Transposed, InPlace),
    "set": (SetInto, InPlace),
    "in-training": (InTraining, InPlaceInTraining),
    "in-evaluation": (InEvaluation, InPlaceInEvaluation),
    "sometimes": (Sometimes, InPlaceSometimes),
    "hook": (ByHook, InPlace),
    "after-forward": (AfterForward, InPlaceAfterForward),
    "flattened": (Flattened, Net),
    "ternary": (Ternary, InPlaceTernary),
    "exchanged": (Exchanged, Net),
    "parametrized": (Parametrized, InPlaceParametrized),
    "mode": (ModeAssigns, InPlace),
    "cache": (Cache, Net),
    "extra": (Extra, Net),
    "descending": (Descending, DescendingByHand),
    "drawing": (Drawing, Drawing),
    "scripted": (lambda: torch.jit.script(Net()), Net),
    "adapter": (lambda: Adapter(assigns=True, frozen=False), lambda: Unmerged(frozen=False)),
    "adapter-in-place": (lambda: Adapter(assigns=False, frozen=False), lambda: Unmerged(frozen=False)),
    "adapter-frozen": (lambda: Adapter(assigns=True, frozen=True), lambda: Unmerged(frozen=True)),
    "adapter-frozen-in-place": (lambda: Adapter(assigns=False, frozen=True), lambda: Unmerged(frozen=True)),
}
"""Each module, and its twin that leaves the memory of its parameters alone."""
REFUSED: Mapping[str, tuple[Callable[[], nn.Module], str]] = {
    "replaced": (Replaced, "first.weight"),
    "replaced-in-training": (ReplacedInTraining, "first.weight"),
    "replaced-layer": (ReplacedLayer, "head.weight"),
    "late": (Late, "late.bias"),
    "late-in-training": (LateInTraining, "late.bias"),
    "removed": (Removed, "head.bias"),
    "pruned": (Pruned, "first.weight"),
    "wider": (Wider, "first.weight"),
    "doubled": (Doubled, "head.weight"),
    "no-gradients": (NoGradients, "first.weight"),
    "own-gradients": (OwnGradients, "first.weight"),
    "frozen-drift": (FrozenDrift, "teacher.weight"),
    "unfreezes": (Unfreezes, "unfreezes the parameter 'first.weight'"),
    "freezes": (Freezes, "freezes the parameter 'first.weight'"),
    "threads": (Threads, "sets torch's threads to 2"),
    "listed": (Listed, r"shape \(8, 12\) that is none of its parameters: .*ModuleList"),
    "unregistered": (Unregistered, r"shape \(8, 12\) that is none of its parameters: .*nn\.Parameter"),
    "overwritten": (Overwritten, r"modified by an inplace operation.*; compute in new tensors: x = x \+ 1"),
    "fresh-layer": (FreshLayer, r"shape \(4, 4\) that is none of its parameters"),
    "keeps-graph": (KeepsGraph, r"state\.detach\(\)"),
    "cut": (Cut, "the model's output: expected a row for each of 10 samples, got 8 rows"),
    "meta": (on_meta, "'first.weight' on the meta device"),
}
"""Each module, and what the refusal says."""


def written(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    output.sigmoid_()
    return output.sum(), len(target)


def written_whole(output: Tensor, target: Tensor) -> float:
    output.zero_()
    return 1.0


def writing() -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that writes to its argument."""
    return lambda output, target: functional.cross_entropy(output.neg_().neg(), target, reduction="none")


def reading() -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: functional.cross_entropy(output, target, reduction="none")


def make(name: str, twin: bool = False) -> nn.Module:
    """Return a module by its name in a table."""
    if name in ("plain", "backbone"):
        return Net() if name == "plain" else Backbone()
    return ADOPTED[name][int(twin)]() if name in ADOPTED else REFUSED[name][0]()
