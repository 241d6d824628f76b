"""Completion of ``KEY=VALUE`` arguments by the shell: keys and values of a recipe, from its JSON Schema.

bash splits a word at "=", so its value is completed alone; zsh and fish complete the whole word.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

NAMED = ("algorithm", "model")
"""Sections whose keys depend on their ``name``."""
MOST_HELP = 80
"""Characters of a key's meaning that are shown."""
RETURN = "    return 0\n"
NO_SPACE = "    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[.=] ]] && compopt -o nospace\n\n"
Schema = Mapping[str, Any]


class BashWithoutSpace(BashComplete):
    """bash, without a space behind a section or a key, whose rest is typed next."""

    source_template = BashComplete.source_template.replace(RETURN, NO_SPACE + RETURN)


def set_up() -> None:
    """Take `BashWithoutSpace` for bash."""
    add_completion_class(BashWithoutSpace, "bash")


def complete_override(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return what a word of a recipe's overrides may become."""
    given = [str(word) for word in ctx.params.get("overrides") or ()]
    key, equals, start = incomplete.partition("=")
    before = f"{key}=" if equals else ""
    if not equals and (in_bash := _key_before(given)):
        key, start = in_bash, incomplete
        given = given[: given.index(in_bash)]
    elif not equals:
        return [*_keys(incomplete, _names(ctx.params.get("recipe"), given))]
    names = _names(ctx.params.get("recipe"), given)
    values = [value for part in _at(key.split("."), names) for value in _values(part)]
    return [CompletionItem(before + value) for value in dict.fromkeys(values) if value.startswith(start)]


def _key_before(words: Sequence[str]) -> str:
    """Return the key whose value bash completes, "" if it completes a key: words are ``key``, ``=`` and ``value``."""
    if words and words[-1] == "=":
        return words[-2] if len(words) > 1 else ""
    is_value = len(words) > 1 and words[-2] == "="
    return words[-1] if words and "=" not in words[-1] and not is_value else ""


def _names(recipe: str | None, overrides: Sequence[str]) -> dict[str, str]:
    """Return the names of the method and the model, as far as the recipe's file and the overrides say."""
    from hpcfed.config.load import read_yaml
    from hpcfed.errors import HpcfedError

    found: dict[str, str] = {}
    with suppress(HpcfedError, OSError):
        content = read_yaml(Path(str(recipe)))
        for section in NAMED:
            part = content.get(section)
            name = part.get("name") if isinstance(part, Mapping) else part
            found |= {section: name} if isinstance(name, str) else {}
    words = " ".join(overrides).replace(" = ", "=").split()  # as bash has split them
    for section in NAMED:
        for word in words:
            if word.startswith(f"{section}.name="):
                found[section] = word.partition("=")[2]
    return found


def _keys(start: str, names: Mapping[str, str]) -> Iterator[CompletionItem]:
    """Yield the keys and sections one level below what has been typed."""
    *above, last = start.split(".")
    prefix = "".join(f"{part}." for part in above)
    found: dict[str, CompletionItem] = {}
    for part in _at(above, names):
        for key, schema in _properties(part, names.get(".".join(above), "")).items():
            is_section = any(other.get("properties") for other in _alternatives(schema))
            word = f"{prefix}{key}{'.' if is_section else '='}"
            described = str(schema.get("description", "")) if isinstance(schema, Mapping) else ""
            if key.startswith(last) and not found.get(word, CompletionItem("")).help:
                found[word] = CompletionItem(word, help=described[:MOST_HELP] or None)
    yield from found.values()


def _at(path: Sequence[str], names: Mapping[str, str]) -> list[Schema]:
    """Return the schemas of a dotted key; numbers are places in lists."""
    places = [_schema()]
    for depth, key in enumerate(path):
        name = names.get(".".join(path[:depth]), "")
        inner = [
            place.get("items", {}) if key.isdecimal() else _properties(place, name).get(key, {}) for place in places
        ]
        places = [part for schema in inner for part in _alternatives(schema)]
    return places


def _properties(schema: Schema, name: str) -> dict[str, Any]:
    """Return the keys of a section; of its ``name`` alone if it is known, else of all names."""
    found = dict(schema.get("properties", {}))
    cases = [case for case in schema.get("allOf", ()) if "if" in case]
    named = [case for case in cases if case["if"]["properties"]["name"]["const"] == name]
    for case in named or cases:
        found |= {key: value for key, value in case["then"]["properties"].items() if value is not True}
    return found


def _alternatives(schema: Any) -> list[Schema]:
    """Return what a schema may be, its references followed."""
    if not isinstance(schema, Mapping):
        return []
    if "$ref" in schema:
        return _alternatives(_schema()["$defs"][schema["$ref"].rpartition("/")[2]])
    parts = [part for key in ("anyOf", "oneOf") for part in schema.get(key, ())]
    return [schema, *(found for part in parts for found in _alternatives(part))]


def _values(schema: Schema) -> Iterator[str]:
    """Yield the values of a key that are words, and its default."""
    words = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    words += [True, False] if schema.get("type") == "boolean" else []
    words += [schema["default"]] if isinstance(schema.get("default"), str | int | float) else []
    yield from (word if isinstance(word, str) else json.dumps(word) for word in words if word is not None)


@cache
def _schema() -> Schema:
    from hpcfed.cli.schema import of_recipe

    return of_recipe()
