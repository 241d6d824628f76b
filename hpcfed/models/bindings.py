"""The tie between a user's module and the flat vectors: every parameter is a view of one, its gradient of the other.

A module may break it. ``self.weight.data = …`` in a forward pass, ``flatten_parameters()`` of cuDNN, a hook, or a
``train()`` that merges adapters leave a parameter with other memory, which steps would no longer reach. After each
forward pass, after each gradient, and before each load, every parameter is compared with its view:

    other memory, same shape and dtype   in training the value is copied into the view, as if it had been written there;
                                         in evaluation it is forgotten; the parameter is a view again
    all else                             refused by the parameter's name: another shape or dtype, another object in its
                                         place, a parameter that is new or gone, a gradient with other memory

Frozen parameters are no views. They are compared by their content once a client is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import torch
import xxhash
from torch import Tensor, equal, nn, uint8

from hpcfed.errors import InputError

REMEDY = "make all parameters in __init__, and change them in place: with torch.no_grad(): self.weight.copy_(…)"

FREEZING = "freeze by parameters.frozen, from one run to the next: start that one from the file (model.init)"


class _Bound(NamedTuple):
    """A trainable parameter, its views of the two vectors, and their addresses."""

    name: str
    parameter: nn.Parameter
    value: Tensor
    grad: Tensor
    places: tuple[int, int]


class _Frozen(NamedTuple):
    """A frozen parameter, its address and version when it was last compared, and the hash of its content."""

    parameter: nn.Parameter
    seen: tuple[int, int]
    content: int


class Bindings:
    """The parameters of a user's module, by name, and what they must stay bound to.

    Args:
        values, grads: each trainable parameter's views of the vector and of its gradient.

    Attributes:
        switches: whether ``train`` or ``eval`` of one of its modules is the user's.
        rebound: name of a parameter whose memory a call has replaced; None if none has.
    """

    def __init__(self, module: nn.Module, values: Mapping[str, Tensor], grads: Mapping[str, Tensor]):
        self._module = module
        named = dict(module.named_parameters())
        self._bound = [
            _Bound(name, named[name], value, grads[name], (value.data_ptr(), grads[name].data_ptr()))
            for name, value in values.items()
        ]
        self._holders = [
            (f"{path}.{name}".lstrip("."), part._parameters, name, parameter)
            for path, part in module.named_modules(remove_duplicate=False)
            for name, parameter in part._parameters.items()
            if parameter is not None
        ]
        self._named = named
        self._frozen = {name: _seen(one) for name, one in named.items() if name not in values}
        self._kept: dict[str, Tensor] = {}
        self._threads = torch.get_num_threads()
        self.rebound: str | None = None
        self.switches = any(
            getattr(type(part), name) is not getattr(nn.Module, name)
            for part in module.modules()
            for name in ("train", "eval")
        )

    @property
    def are_hooked(self) -> bool:
        """Whether a trainable parameter has a hook that is called with its gradient added up."""
        return any(bound.parameter._post_accumulate_grad_hooks for bound in self._bound)

    def keep_values(self) -> None:
        """Copy values that lie elsewhere into the views, and bind their parameters again.

        Raises:
            InputError: a parameter that cannot be, by name.
        """
        self._bind(keeps=True)

    def adopt(self) -> None:
        """After a gradient: copy values that lie elsewhere into the views, and bind their parameters again.

        Raises:
            InputError: a parameter or a gradient that cannot be, by name.
        """
        for bound in self._bound:
            grad = bound.parameter.grad
            if grad is None or grad.data_ptr() != bound.places[1]:
                got = "none" if grad is None else "another tensor"
                what = f"model: training replaces the gradient of parameter {bound.name!r}"
                remedy = "leave out zero_grad, and assignments to .grad, in the module and its hooks"
                raise InputError(what, expected="the tensor to which gradients are added", got=got, remedy=remedy)
        self._bind(keeps=True)

    def rebind(self) -> None:
        """Bind all parameters again, to the values in the views; undo what a merge left in frozen ones.

        Raises:
            InputError: a parameter that cannot be, by name.
        """
        self._bind(keeps=False)
        for name, kept in self._kept.items():
            self._frozen[name].parameter.data.copy_(kept)

    def check(self) -> None:
        """Refuse parameters that are new or gone, and frozen ones whose content has changed.

        Raises:
            InputError: naming one.
        """
        named = dict(self._module.named_parameters())
        if new := sorted(named.keys() - self._named.keys()):
            self._refuse(f"makes a parameter {new[0]!r}, which is not trained")
        if gone := sorted(self._named.keys() - named.keys()):
            self._refuse(f"removes the parameter {gone[0]!r}")
        for name, parameter in self._named.items():
            if named[name] is not parameter:
                self._refuse(f"replaces the parameter {name!r}")
        for bound in self._bound:
            if not bound.parameter.requires_grad:
                self._refuse(f"freezes the parameter {bound.name!r}, which the recipe trains", FREEZING)
        if torch.get_num_threads() != self._threads:
            what = f"sets torch's threads to {torch.get_num_threads()}, by which results differ"
            self._refuse(what, "leave it to the recipe's threads")
        for name, frozen in self._frozen.items():
            if frozen.parameter.requires_grad:
                self._refuse(f"unfreezes the parameter {name!r}, which is not trained", FREEZING)
            if (frozen.parameter.data_ptr(), frozen.parameter._version) == frozen.seen:
                continue
            self._frozen[name] = _seen(frozen.parameter)
            if self._frozen[name].content != frozen.content:
                what = f"changes the frozen parameter {name!r}, which would carry one client's data to the next"
                self._refuse(what)

    @contextmanager
    def in_training_mode(self) -> Iterator[None]:
        """Change values as a module in training mode has them: one whose ``eval`` merges some into others has them
        merged else.
        """
        module = self._module
        if module.training or not self.switches:
            yield
            return
        module.train()
        try:
            self.rebind()
            yield
        finally:
            module.eval()

    def keep_merged(self) -> None:
        """Find frozen parameters that ``eval`` changes, as merged adapters do, and keep copies of them.

        The trainable ones get values that adapters do not begin with, since many begin with 0; the caller sets them
        again.
        """
        if not (self.switches and self._frozen):
            return
        before = {name: one.parameter.detach().clone() for name, one in self._frozen.items()}
        for bound in self._bound:
            bound.value.fill_(0.5)
        self._module.eval()
        self._kept = {
            name: kept for name, kept in before.items() if not equal(self._frozen[name].parameter.detach(), kept)
        }
        self._module.train()
        self.rebind()

    def _bind(self, *, keeps: bool) -> None:
        for name, own, key, parameter in self._holders:
            now = own[key] if key in own else None  # noqa: SIM401 (a scripted module's have no get)
            if now is not parameter:
                self._refuse(f"{'removes' if now is None else 'replaces'} the parameter {name!r}")
        for bound in self._bound:
            parameter, value = bound.parameter, bound.value
            layout = parameter.data_ptr(), parameter.shape, parameter.stride()
            if layout == (bound.places[0], value.shape, value.stride()):
                continue
            self.rebound, data = bound.name, parameter.data
            if keeps:
                if (data.shape, data.dtype, data.device) != (value.shape, value.dtype, value.device):
                    kinds = [f"{tuple(one.shape)} in {one.dtype} on {one.device}" for one in (value, data)]
                    what = f"model: its calls give parameter {bound.name!r} another shape or type"
                    raise InputError(what, expected=kinds[0], got=kinds[1], remedy=REMEDY)
                value.copy_(data)
            parameter.data = value

    def _refuse(self, what: str, remedy: str = REMEDY) -> NoReturn:
        raise InputError(f"model: a call of the module {what}", remedy=remedy)


def _seen(parameter: nn.Parameter) -> _Frozen:
    """Return a frozen parameter as it is now."""
    content = parameter.detach().cpu().contiguous().flatten().view(uint8).numpy().data
    return _Frozen(parameter, (parameter.data_ptr(), parameter._version), xxhash.xxh3_64_intdigest(content))
