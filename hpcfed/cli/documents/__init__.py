"""Documents that commands print with ``--json``: a dataclass each, in the file of the command's name, as `DOCUMENT`.

The docstrings below the fields are the descriptions of the schemas and the meanings in docs/json.md. Every key is
always there; what is not known, and numbers that are not finite, are null. A command that fails before it has printed
its own prints that of `ERROR`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, fields, is_dataclass
from typing import Any, get_args, get_type_hints

import click

from hpcfed.config import registry

VERSION = 1
"""Of all documents: keys may be added to it, none is renamed or removed."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"
ERROR = "error"
Printer = Callable[[Any], None]
COMMAND_MEANING, VERSION_MEANING = "The command that printed the document.", "Version of the documents' keys."
JSON = click.option(
    "--json", "as_json", is_flag=True,
    help="Print one JSON document, and all else on standard error; hpcfed schema --of names its keys.",
)  # fmt: skip


_printed: set[str] = set()
"""Commands of this process that have printed theirs."""


def begin(command: str) -> None:
    """Note that a command begins; a process may run it several times."""
    _printed.discard(command)


def commands() -> list[str]:
    """Return the commands that have a document, and `ERROR`."""
    return registry.names(__name__)


def printer(command: str, *, asked: bool) -> Printer | None:
    """Keep standard output for one document until the command ends: what else is printed goes to standard error.

    Args:
        command: its name.
        asked: whether a document is asked for.

    Returns:
        A function that prints the document, which fails as `hpcfed.io.output.Output` does; None if none is asked for.
    """
    if not asked:
        return None
    out = sys.stdout

    def emit(document: Any) -> None:
        _printed.add(command)
        out.write(as_json(command, document))
        out.flush()

    click.get_current_context().with_resource(redirect_stdout(sys.stderr))
    return emit


def text_of(content: Any) -> str:
    """Return JSON, in which numbers that are not finite are null."""
    from hpcfed.run_folder.rounds import finite

    return json.dumps(finite(content), indent=1, allow_nan=False)


def error_of(command: str, code: int, message: str) -> str:
    """Return the document of a command that failed; "" where it has printed its own."""
    from hpcfed.cli.documents.error import CommandError, ErrorDocument

    said = message.strip().removeprefix("hpcfed: ")
    return "" if command in _printed else as_json(command, ErrorDocument(CommandError(code, said)))


def as_json(command: str, document: Any) -> str:
    """Return a document as JSON in ASCII, which no stream has to escape."""
    content = {"command": command, "version": VERSION, **asdict(document)}
    return text_of(content) + "\n"


def schema_of(command: str) -> dict[str, Any]:
    """Return the JSON Schema of a command's document."""
    from pydantic import TypeAdapter

    from hpcfed.config.meanings import docstrings_of

    kind = registry.entry(__name__, command).DOCUMENT
    schema = TypeAdapter(kind).json_schema(mode="serialization", ref_template="#/$defs/{model}")
    for name, part in parts_of(kind).items():
        place = schema if part is kind else schema["$defs"][name]
        place["additionalProperties"] = False
        for key, meaning in docstrings_of(part).items():
            place["properties"][key]["description"] = meaning
    own = {
        "command": {**({"type": "string"} if command == ERROR else {"const": command}), "description": COMMAND_MEANING},
        "version": {"const": VERSION, "description": VERSION_MEANING},
    }
    schema["properties"] = own | schema["properties"]
    schema["required"] = [*own, *schema["required"]]
    schema["title"] = "an error with --json" if command == ERROR else f"hpcfed {command} --json"
    return {"$schema": DIALECT, **schema}


def parts_of(kind: type) -> dict[str, type]:
    """Return a dataclass and those of its fields, by name."""
    found = {kind.__name__: kind}
    hints = get_type_hints(kind)
    for field in fields(kind):
        for part in _dataclasses(hints[field.name]):
            if part.__name__ not in found:
                found |= parts_of(part)
    return found


def keys_of(command: str) -> Iterator[tuple[str, str]]:
    """Yield the keys of a command's document, dotted, each with its meaning.

    ``[]`` stands behind a list, ``.*`` behind a mapping.
    """
    yield from _keys(registry.entry(__name__, command).DOCUMENT, "")


def _keys(kind: type, prefix: str) -> Iterator[tuple[str, str]]:
    from hpcfed.config.meanings import docstrings_of

    hints, meanings = get_type_hints(kind), docstrings_of(kind)
    for field in fields(kind):
        yield prefix + field.name, meanings[field.name]
        shape = str(hints[field.name])
        many = "[]" if shape.startswith("list[") else ".*" if shape.startswith("dict[") else ""
        for part in _dataclasses(hints[field.name]):
            yield from _keys(part, f"{prefix}{field.name}{many}.")


def _dataclasses(annotation: Any) -> list[type]:
    """Return the dataclasses in a field's type."""
    if isinstance(annotation, type) and is_dataclass(annotation):
        return [annotation]
    return [found for part in get_args(annotation) for found in _dataclasses(part)]
