"""Roles of a module's parameters and buffers in a federation, from the recipe's patterns of names.

A parameter is shared (what methods call w), private to each client, or frozen. A buffer is averaged over clients,
private, or fixed; one without a role must be constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from hpcfed.config.parameters import Parameters
from hpcfed.errors import InputError, nearest

BufferRole = Literal["averaged", "private", "fixed"]
MAX_LISTED = 6
"""Names that a message lists."""


@dataclass(frozen=True)
class Roles:
    """Names of a module's parameters and buffers that have a role.

    Attributes:
        frozen, private: parameters.
        buffers: role of each buffer that has one.
    """

    frozen: frozenset[str] = frozenset()
    private: frozenset[str] = frozenset()
    buffers: Mapping[str, BufferRole] = field(default_factory=dict)

    def buffers_of(self, role: BufferRole) -> list[str]:
        """Return the buffers that have this role, in the module's order."""
        return [name for name, own in self.buffers.items() if own == role]


def roles_of(section: Parameters, module: nn.Module) -> Roles:
    """Return the roles that the recipe's ``parameters`` give to a module's tensors.

    Raises:
        InputError: a pattern matches nothing, a name is both private and frozen, no shared parameter is left, there are
            no buffers to have a role, or running statistics have none.
    """
    parameters = [name for name, _ in module.named_parameters()]
    kept = module.state_dict().keys()
    buffers = [name for name, _ in module.named_buffers() if name in kept]
    aliases = _first_names(module)
    frozen, private = (_matching(key, getattr(section, key), aliases) for key in ("frozen", "private"))
    if both := sorted(frozen & private):
        raise InputError(
            "parameters", expected="no name that is both private and frozen", got=", ".join(both[:MAX_LISTED])
        )
    if section.buffers is not None and not buffers:
        raise InputError(f"parameters.buffers: {section.buffers}, but the model has no buffers", remedy="leave it out")
    found = dict(_buffer_roles(section, buffers, frozen, private))
    _refuse_running_statistics(module, found)
    roles = Roles(frozen & {*parameters}, private & {*parameters}, found)
    _refuse_nothing_shared(module, roles)
    return roles


def _first_names(module: nn.Module) -> dict[str, str]:
    """Return, for every name of a parameter or a buffer of the state dict, the first name of the same tensor."""
    first: dict[int, str] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    kept = module.state_dict().keys()
    return {name: first.setdefault(id(tensor), name) for name, tensor in named if name in kept}


def _matching(key: str, patterns: Sequence[str], names: Mapping[str, str]) -> frozenset[str]:
    """Return the tensors, by their first names, that one of the patterns matches."""
    found: set[str] = set()
    for pattern in patterns:
        matched = {first for name, first in names.items() if fnmatchcase(name, pattern)}
        if not matched:
            raise InputError(
                f"parameters.{key}: {pattern!r} matches no parameter or buffer of the model",
                remedy=_hint(pattern, list(names)),
            )
        found |= matched
    return frozenset(found)


def _hint(pattern: str, names: Sequence[str]) -> str:
    """Return a name or a pattern that the user may have meant, or the first names of the model."""
    if any(name.startswith(f"{pattern}.") for name in names):
        return f"did you mean '{pattern}.*'?"
    if len(names) <= MAX_LISTED:
        return nearest(pattern, names)
    return f"its names are {', '.join(names[:MAX_LISTED])}, … ({len(names)})"


def _buffer_roles(
    section: Parameters, buffers: Sequence[str], frozen: frozenset[str], private: frozenset[str]
) -> Iterator[tuple[str, BufferRole]]:
    for name in buffers:
        if name in frozen:
            yield name, "fixed"
        elif name in private:
            yield name, "private"
        elif section.buffers is not None:
            yield name, section.buffers


def tracking(module: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """Yield each layer that keeps running statistics: its name, itself, and the names of its buffers."""
    for name, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            yield name, part, [f"{name}.{own}".lstrip(".") for own, _ in part.named_buffers(recurse=False)]


def _refuse_running_statistics(module: nn.Module, roles: Mapping[str, BufferRole]) -> None:
    for name, part, buffers in tracking(module):
        if not roles.keys() >= {*buffers}:
            raise InputError(
                f"model: {name or 'the module'} ({type(part).__name__}) keeps running statistics",
                expected="parameters.buffers to say what becomes of them",
                got="nothing",
                remedy="set parameters.buffers to averaged, private or fixed; or use GroupNorm",
            )


def _refuse_nothing_shared(module: nn.Module, roles: Roles) -> None:
    trainable = {name for name, p in module.named_parameters() if p.requires_grad} - roles.frozen
    if not trainable:
        raise InputError("model", expected="at least one trainable parameter", got="none")
    if trainable <= roles.private:
        what = "parameters.private matches every trainable parameter: nothing is left to average"
        remedy = "leave at least one parameter shared; clients that train alone are a baseline of hpcfed study"
        raise InputError(what, remedy=remedy)
