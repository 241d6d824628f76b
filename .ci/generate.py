"""Write what is generated (for ``make generated``): tables of docs/recipe.md and docs/json.md, docs/leaderboard.md, and
the JSON Schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hpcfed import algorithms, models
from hpcfed.cli.documents import ERROR, commands, keys_of
from hpcfed.cli.schema import of_experiment, of_recipe
from hpcfed.config.meanings import keys
from jobs.bench import leaderboard

ROOT = Path(__file__).resolve().parent.parent
SCHEMAS = {"recipe": of_recipe, "experiment": of_experiment}
BEGIN, END = "<!-- by make generated -->\n", "<!-- end -->\n"


def recipe_keys() -> str:
    """Return the table of keys, a row each, with their defaults."""
    rows = ["| key | meaning |", "|---|---|"]
    for key in keys():
        default = key.field.default
        plain = isinstance(default, str | int | float) and not isinstance(default, BaseModel)
        rows.append(f"| `{key.dotted}{f': {_plain(default)}' if plain else ''}` | {key.meaning} |")
    return "\n".join([*rows, ""])


def named_models() -> str:
    """Return the table of models with their keys."""
    rows = ["| `model.name` | model | keys and their defaults |", "|---|---|---|"]
    for name, spec in sorted(models.named().items()):
        about = " ".join((spec.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")
        rows.append(f"| `{name}` | {about.rstrip('.')} | {', '.join(_keys([spec]))} |")
    return "\n".join([*rows, ""])


def methods() -> str:
    """Return the table of methods with their keys, and the line of parts, in Markdown."""
    rows = [
        "| `algorithm.name` | method | `weights` | `evaluate.model` | keys and their defaults |",
        "|---|---|---|---|---|",
    ]
    for name in algorithms.names():
        local, _, server = parts = algorithms.parts_of(name)
        weights, model = (getattr(part, key, "last") for part, key in ((local, "weights"), (server, "final_model")))
        kinds = [kind for kind in parts if kind is not None]
        rows.append(f"| `{name}` | {algorithms.titles()[name]} | {weights} | {model} | {', '.join(_keys(kinds))} |")
    roles = algorithms.DEFAULT_PARTS.items()
    parts = "; ".join(
        f"`{role}` is {_one_of(default, sorted(algorithms.choices(role.upper())))}" for role, default in roles
    )
    names = "A method's name stands for its part: `{local: fedprox, server: fedyogi, mu: 0.1}`."
    return "\n".join([*rows, "", f"Parts of a product: {parts}.", names, "Each part takes its own keys.", ""])


def recipe_page(text: str) -> str:
    """Return docs/recipe.md with today's tables of keys, models and methods."""
    return _with_tables(text, (recipe_keys(), named_models(), methods()))


def document_keys() -> str:
    """Return the tables of keys of all commands' documents, under a heading each."""
    found = []
    for command in commands():
        rows = [f"| `{key}` | {meaning.replace('|', chr(92) + '|')} |" for key, meaning in keys_of(command)]
        title = "An error with `--json`" if command == ERROR else f"`hpcfed {command} --json`"
        found.append("\n".join([f"## {title}", "", "| key | meaning |", "|---|---|", *rows, ""]))
    return "\n".join(found)


def json_page(text: str) -> str:
    """Return docs/json.md with today's keys."""
    return _with_tables(text, (document_keys(),))


def leaderboard_page(_: str = "") -> str:
    """Return docs/leaderboard.md of the records in docs/leaderboard."""
    return leaderboard.page()


def _with_tables(text: str, tables: Sequence[str]) -> str:
    """Return a page with its generated tables, in order, replaced."""
    head, *parts = text.split(BEGIN)
    pairs = zip(tables, parts, strict=True)
    return head + "".join(f"{BEGIN}\n{table}\n{END}{part.split(END)[1]}" for table, part in pairs)


def schema(name: str) -> str:
    """Return what ``hpcfed schema`` prints of a ``recipe`` or an ``experiment``."""
    return json.dumps(SCHEMAS[name](), indent=1, ensure_ascii=False) + "\n"


def _keys(kinds: list[type[BaseModel]]) -> list[str]:
    fields = {key: field for kind in kinds for key, field in kind.model_fields.items()}
    return [_spelled(key, field) for key, field in sorted(fields.items(), key=lambda item: not item[1].is_required())]


def _spelled(key: str, field: FieldInfo) -> str:
    if field.is_required():
        return f"`{key}`"
    default = field.get_default(call_default_factory=True)
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    others = [f"`{value}`" for value in choices if value != default]
    return f"`{key}: {_plain(default)}`" + (f" (or {', '.join(others)})" if others else "")


def _plain(value: object) -> str:
    return f"{value:g}" if type(value) is float else str(value).lower() if value is not None else "null"


def _one_of(default: str, known: list[str]) -> str:
    first, *others = [default, *(name for name in known if name != default)]
    return f"`{first}` (default)" + "".join(f", `{name}`" for name in others[:-1]) + f" or `{others[-1]}`"


PAGES = {"recipe.md": recipe_page, "json.md": json_page, "leaderboard.md": leaderboard_page}


def main() -> None:
    """Rewrite the files in place."""
    for name, of in PAGES.items():
        page = ROOT / "docs" / name
        page.write_text(of(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name in SCHEMAS:
        (ROOT / "jobs" / "recipes" / f"{name}.schema.json").write_text(schema(name), encoding="utf-8")


if __name__ == "__main__":
    main()
