"""What a module does beside the calls of its forward pass: hooks, and attributes that a call changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, jit, nn, strided
from torch.nn.modules import module as of_all_modules

from hpcfed.config.user_code.generators import Own, state_of
from hpcfed.models.reading.program import Unreadable

HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"),
)
OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module, mostly empty tables of hooks."""
TABLES = "_parameters", "_buffers", "_modules"
PLAIN = (type(None), bool, int, float, complex, str, bytes)
MAX_DEPTH, MAX_MEMBERS = 4, 1000
"""Of containers that are looked into."""


def refuse_hooks(module: nn.Module) -> None:
    """Refuse a module that is compiled, or has hooks on calls or gradients.

    Raises:
        Unreadable: naming the part.
    """
    if any(getattr(of_all_modules, name, None) for name in HOOKS):
        raise Unreadable("hooks on all modules")
    for path, part in module.named_modules():
        place = f"{path or 'the module'} ({type(part).__name__})"
        if isinstance(part, jit.ScriptModule):
            raise Unreadable("a scripted module", place)
        if any(getattr(part, name, None) for name in HOOKS):
            raise Unreadable("hooks", place)
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise Unreadable("hooks on gradients", name)


class Attributes:
    """The attributes of a module's parts, parameters and buffers among them, as they are now."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._before = dict(self._all())

    def refuse_changes(self) -> None:
        """Refuse a module whose attributes have changed since.

        Raises:
            Unreadable: naming one.
        """
        now = dict(self._all())
        for name in self._before.keys() | now.keys():
            if not _is_same(self._before.get(name, self), now.get(name, self)):
                raise Unreadable(f"a call changes {name}")

    def _all(self) -> Iterator[tuple[str, list[Any]]]:
        for path, part in self._module.named_modules():
            for name, value in vars(part).items():
                if name not in TABLES and (name not in OF_TORCH or value):
                    yield f"{path}.{name}".lstrip("."), [*_members(value, MAX_DEPTH)]
            for name, tensor in (*part._buffers.items(), *part._parameters.items()):
                yield f"{path}.{name}".lstrip("."), [*_members(tensor, 0)]


def _members(value: Any, depth: int) -> Iterator[Any]:
    """Yield what a value is: itself, and what it holds; a tensor with its version and address, a random generator with
    its state, a container with its length."""
    if isinstance(value, PLAIN):
        yield value
    elif isinstance(value, Tensor):
        yield value
        yield None if value.is_inference() else value._version
        yield value.data_ptr() if value.layout == strided else None
    elif isinstance(value, Own):
        yield value
        yield str(state_of(value))
    elif isinstance(value, (list, tuple, dict, set)) and depth:
        yield type(value)
        yield len(value)
        if len(value) <= MAX_MEMBERS:
            for one in [*value.keys(), *value.values()] if isinstance(value, dict) else value:
                yield from _members(one, depth - 1)
    else:
        yield value


def _is_same(before: Any, now: Any) -> bool:
    if type(before) is not list or type(now) is not list or len(before) != len(now):
        return False
    return all(
        one is other or (isinstance(one, PLAIN) and isinstance(other, PLAIN) and one == other)
        for one, other in zip(before, now, strict=True)
    )
