"""Meanings of keys: the docstrings below fields, for the pages and the descriptions of JSON Schemas."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, get_args

from pydantic.fields import FieldInfo

from hpcfed.config.limits import Section
from hpcfed.config.recipe import Recipe


class Key(NamedTuple):
    """A key of a recipe: its dotted name, its section and name there, its field, and its meaning as Markdown."""

    dotted: str
    section: type[Section]
    name: str
    field: FieldInfo
    meaning: str


def keys(section: type[Section] = Recipe, prefix: str = "") -> Iterator[Key]:
    """Yield the documented keys of a section, each followed by those of its own section."""
    meanings = docstrings_of(section)
    for attribute, field in section.model_fields.items():
        if attribute in meanings:
            name = field.alias or attribute
            yield Key(prefix + name, section, name, field, meanings[attribute])
            for inner in _sections(field.annotation):
                yield from keys(inner, f"{prefix}{name}.")


def docstrings_of(kind: type) -> dict[str, str]:
    """Return field → the docstring below it, on one line; of a model or a dataclass."""
    return _docstrings(kind.__module__)[kind.__name__]


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return class → field → the docstring below it, on one line."""
    classes = [
        node for node in ast.parse(inspect.getsource(sys.modules[module])).body if isinstance(node, ast.ClassDef)
    ]
    return {
        one.name: {
            ast.unparse(field.target): " ".join(str(ast.literal_eval(text.value)).split())
            for field, text in zip(one.body, one.body[1:], strict=False)
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        }
        for one in classes
    }


def _sections(annotation: Any) -> list[type[Section]]:
    """Return the sections in a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [found for part in get_args(annotation) for found in _sections(part)]
