"""The generated pages of the site: methods from their files, Python's names from docstrings, commands from --help."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
import pictures
from pydantic.fields import FieldInfo

import hpcfed
from hpcfed import algorithms
from hpcfed.cli.main import cli as command
from hpcfed.config import registry
from hpcfed.config.load import dump_yaml
from hpcfed.lab import cite

ROOT = Path(__file__).resolve().parent.parent.parent
BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def generated() -> dict[str, str]:
    """Return the generated pages and pictures, name → content."""
    drawn = pictures.of_methods()
    found = {f"methods/{name}.md": method_page(name) for name in algorithms.names()}
    found |= {f"methods/{name}.svg": picture for name, picture in drawn.items()}
    found["methods/index.md"] = methods_page()
    return found | {
        "reference/python.md": python_page((ROOT / "docs" / "api.md").read_text(encoding="utf-8")),
        "reference/types.md": TYPES,
        "reference/commands.md": commands_page(),
    }


def methods_page() -> str:
    """Return the list of methods."""
    rows = [f"| [{title}]({name}.md) | `{name}` | {_about(name)} |" for name, title in algorithms.titles().items()]
    tree = "\n".join(algorithms.names())
    return (
        f"# The methods\n\nEach is one file of `hpcfed/algorithms/`; [the recipe](../docs/recipe.md) has all keys.\n\n"
        f"| method | `algorithm.name` | what it is |\n|---|---|---|\n{chr(10).join(rows)}\n\n"
        f"```{{toctree}}\n:hidden:\n\n{tree}\n```\n"
    )


def method_page(name: str) -> str:
    """Return the page of a method: its docstring, recipe, keys, picture, references and code."""
    module = registry.entry("hpcfed.algorithms", name)
    section = dump_yaml({"algorithm": {"name": name, **algorithms.examples()[name]}})
    entries = cite.references()
    code = inspect.getsource(module).replace(f'"""{module.__doc__}"""', "", 1).strip()
    papers = "\n\n".join(entries[key] for key in module.REFERENCES)
    file = f"{module.__name__.replace('.', '/')}.py"
    return "\n\n".join(
        [
            f"# {module.TITLE}",
            _text(name),
            f"## In a recipe\n\n```yaml\n{section}```",
            keys_table(name),
            f"## On a toy\n\n![Iterates and loss of {module.TITLE} beside FedAvg's]({name}.svg)",
            pictures.caption(name),
            f"## To cite\n\nAs `hpcfed cite RUN` prints it:\n\n```bibtex\n{papers}\n```",
            f"## The file\n\n`{file}`, without the text above:\n\n```python\n{code}\n```\n",
        ]
    )


def keys_table(name: str) -> str:
    """Return the table of a method's keys."""
    kinds = [kind for kind in algorithms.parts_of(name) if kind is not None]
    fields = {key: field for kind in kinds for key, field in kind.model_fields.items()}
    if not fields:
        return "It has no keys."
    rows = [f"| `{key}` | {_default(field)} | {_values(field)} |" for key, field in fields.items()]
    return "\n".join(["| key | default | values |", "|---|---|---|", *rows])


def python_page(api: str) -> str:
    """Return the reference of `hpcfed`, in the order of docs/api.md."""
    parts = ["# The package: `hpcfed`", "From docstrings; [From Python](../docs/api.md) has examples and tables."]
    for level, title in re.findall(r"^(##|###) (.+)$", api, flags=re.MULTILINE):
        if level == "##":
            parts.append(f"## {title}")
        elif name := re.match(r"`hpcfed\.(\w+)", title):
            found = getattr(hpcfed, name[1])
            kind = "function" if inspect.isfunction(found) else "class"
            parts.append(_autodoc(f"auto{kind}:: hpcfed.{name[1]}", *[":members:"] * (kind == "class")))
    return "\n\n".join(parts) + "\n"


def commands_page() -> str:
    """Return what ``--help`` prints of each command."""
    parts = ["# Commands", "What `hpcfed COMMAND --help` prints. [The tour](../docs/tour.md) uses each of them once."]
    with click.Context(command, info_name="hpcfed", terminal_width=100) as top:
        for name in command.list_commands(top):
            found = command.get_command(top, name)
            assert found is not None
            with click.Context(found, info_name=name, parent=top, terminal_width=100) as context:
                parts.append(f"## `hpcfed {name}`\n\n```\n{found.get_help(context)}\n```")
    return "\n\n".join(parts) + "\n"


def _autodoc(directive: str, *options: str) -> str:
    lines = "\n".join(f"   {option}" for option in options)
    return f"```{{eval-rst}}\n.. {directive}\n{lines}\n```"


TYPES = f"# The vocabulary of methods: `hpcfed.types`\n\n{_autodoc('automodule:: hpcfed.types', ':members:')}\n"


def _about(name: str) -> str:
    return " ".join(_text(name).split("\n\n")[0].split())


def _text(name: str) -> str:
    """Return a method's docstring as Markdown, without its title; formulas are indented, and so code."""
    text = (registry.entry("hpcfed.algorithms", name).__doc__ or "").partition(": ")[2].strip()
    lines = [line.replace("``", "") if line.startswith("    ") else line for line in text.splitlines()]
    return "\n".join([lines[0][0].upper() + lines[0][1:], *lines[1:]])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "to be given"
    default = field.get_default(call_default_factory=True)
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _values(field: FieldInfo) -> str:
    if field.annotation is bool:
        return "`true`, `false`"
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(field.annotation))
    bounds: list[Any] = [
        f"{sign} {getattr(bound, word):g}"
        for bound in field.metadata
        for word, sign in BOUNDS.items()
        if hasattr(bound, word)
    ]
    return ", ".join(bounds) or getattr(field.annotation, "__name__", str(field.annotation))
