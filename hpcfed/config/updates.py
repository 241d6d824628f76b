"""The recipe's lists ``updates`` and ``means``: what happens to an update on its way, before the sum and after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_serializer, model_validator

from hpcfed.config.limits import Section
from hpcfed.config.observer import Reference


class ChainPart(Section):
    """A part of a list: a built-in one by its name, or the user's by `factory`, called with `args`.

    ``{topk: {fraction: 0.01}}`` is short for ``{name: topk, args: {fraction: 0.01}}``, and so recorded.
    """

    name: str | None = None
    factory: Reference | None = None
    args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _name_or_factory(self) -> ChainPart:
        if (self.name is None) == (self.factory is None):
            raise ValueError("a part, such as {clip: {norm: 1.0}}, or {factory: 'module:Class', args: {…}}")
        return self

    @model_serializer(mode="plain")
    def _short(self) -> dict[str, Any]:
        if self.name is not None:
            return {self.name: dict(self.args)}
        return {"factory": self.factory, "args": dict(self.args)}


def parts_named(value: Any) -> Any:
    """Expand ``sign``, ``{topk: {fraction: 0.01}}`` and lists of them to lists of sections."""
    entries = value if isinstance(value, list) else [value]
    return [_named(entry) for entry in entries]


def _named(entry: Any) -> Any:
    if isinstance(entry, str):
        return {"factory" if ":" in entry else "name": entry}
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((name, args),) = entry.items()
        if name not in ChainPart.model_fields:
            if not isinstance(args, Mapping | None):
                raise ValueError(f"the keys of {name} in a mapping, such as {{clip: {{norm: 1.0}}}}")
            return {"name": name, "args": {} if args is None else args}
    return entry
