"""``hpcfed schema``: JSON Schema of a recipe, from the models that check it, and of the commands' documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import click
from pydantic import BaseModel

from hpcfed import algorithms, models, updates
from hpcfed.cli.documents import DIALECT, commands, schema_of
from hpcfed.config.meanings import keys
from hpcfed.config.observer import REFERENCE as REFERENCE_TO_CODE
from hpcfed.config.recipe import Algorithm, Model, Recipe

Schema = dict[str, Any]
REFERENCE = "#/$defs/{model}"
SEEDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
CODE = {"type": "string", "pattern": REFERENCE_TO_CODE}
SIZE = {"type": "integer", "minimum": 1}
FRACTION = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
CLIENT = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}
SHORT_WITHOUT = [CLIENT, {"type": "array", "items": CLIENT, "minItems": 1}]
"""Short forms of ``cohort.without``: a client, or a list of them."""
FILLED_IN = {"name", "output"}
"""Keys that `hpcfed.config.load` adds if a file lacks them."""


@click.command("schema")
@click.option("--experiment", is_flag=True, help="Of an experiment, as 'hpcfed reproduce FILE' takes it.")
@click.option("--of", "document", type=click.Choice(commands()), help="Of what this command prints with --json.")
def command(experiment: bool, document: str | None) -> None:
    """Print the JSON Schema of a recipe: hpcfed schema > recipe.schema.json.

    Editors with the YAML language server then complete, explain and check recipes that begin with the line
    "# yaml-language-server: $schema=recipe.schema.json".
    """
    if experiment and document:
        raise click.UsageError("--experiment and --of: one of them")
    schema = schema_of(document) if document else of_experiment() if experiment else of_recipe()
    click.echo(json.dumps(schema, indent=1, ensure_ascii=False))


def of_recipe() -> Schema:
    """Return the schema of a recipe file; constraints across keys are checked only when a recipe is read."""
    schema = Recipe.model_json_schema(ref_template=REFERENCE)
    properties, sections = schema["properties"], schema["$defs"]
    specs = {name: [spec] for name, spec in models.named().items()}
    methods = {name: [part for part in algorithms.parts_of(name) if part] for name in algorithms.names()}
    loss, observer = (sections[name]["properties"]["name"] for name in ("LossSection", "Observer"))
    observers: list[Schema] = [{"enum": _words(observer)}, CODE]
    one_observer = properties["observers"]["items"]
    properties["observers"]["items"] = {"anyOf": [*observers, one_observer]}
    short: dict[str, list[Schema]] = {  # `hpcfed.config.hints.spelled_out` and the recipe make sections of them
        "seed": [{"type": "integer", "minimum": 0}],
        "observers": [*observers, one_observer],
        "algorithm": [{"enum": _alone(methods)}, CODE],
        "model": [{"enum": _alone(specs)}, CODE],
        "loss": [{"enum": _words(loss)}, CODE],
        "cohort": [SIZE, FRACTION],
    }
    for key, forms in short.items():
        properties[key] = {"anyOf": [*forms, {name: properties[key].pop(name) for name in [*properties[key]]}]}
    for key in updates.LISTS:
        name, part = f"PartOf{key.title()}", {"$ref": REFERENCE.format(model=f"PartOf{key.title()}")}
        sections[name] = _part_of(key)
        properties[key] = {"anyOf": [part, {"type": "array", "items": part}]}
    del sections["ChainPart"]
    sections["CohortSection"]["properties"]["without"]["anyOf"] += SHORT_WITHOUT
    for described in keys():
        place = properties if described.section is Recipe else sections[described.section.__name__]["properties"]
        place[described.name]["description"] = described.meaning
    properties["seeds"] = {"description": properties["seed"]["description"], **SEEDS}
    schema["required"] = [key for key in schema["required"] if key not in FILLED_IN]
    sections["Model"] |= _by_name(sections["Model"], Model, specs)
    sections["Algorithm"] |= _by_name(sections["Algorithm"], Algorithm, methods)
    return {"$schema": DIALECT, "title": "hpcfed recipe", **{key: schema[key] for key in schema if key != "title"}}


def _part_of(key: str) -> Schema:
    """Return the schema of a part of a list: its name, or its name with its keys."""
    known = updates.named(key)
    own = {name: part.model_json_schema(ref_template=REFERENCE) for name, part in known.items()}
    for name, part in own.items():
        own[name] = {key: value for key, value in part.items() if key not in ("title", "description")}
    alone = [name for name, schema in own.items() if not schema.get("required")]
    by_name = {"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": False}
    by_factory = {"type": "object", "required": ["factory"], "additionalProperties": False}
    return {
        "anyOf": [
            *([{"type": "string", "enum": alone}] if alone else []),
            by_name | {"properties": {name: {"anyOf": [schema, {"type": "null"}]} for name, schema in own.items()}},
            CODE,
            by_factory | {"properties": {"factory": CODE, "args": {"type": "object"}}},
        ]
    }


def of_experiment() -> Schema:
    """Return the schema of an experiment's file."""
    from hpcfed.lab.reproduce.experiment import Experiment

    schema = Experiment.model_json_schema(ref_template=REFERENCE)
    schema["required"] = [key for key in schema["required"] if key != "name"]
    return {"$schema": DIALECT, **schema}


def _words(choice: Schema) -> list[str]:
    """Return the words that a schema of a name allows."""
    return [word for one in (choice, *choice.get("anyOf", ())) for word in one.get("enum", ())]


def _alone(known: Mapping[str, Iterable[type[BaseModel]]]) -> list[str]:
    """Return the names whose keys all have defaults, so that the name alone is a section."""
    return sorted(name for name, parts in known.items() if not any(map(_required, parts)))


def _required(part: type[BaseModel]) -> list[str]:
    return [name for name, field in part.model_fields.items() if field.is_required()]


def _by_name(section: Schema, kind: type[BaseModel], known: Mapping[str, Iterable[type[BaseModel]]]) -> Schema:
    """Return an addition to a section's schema: the known names, and the keys of each."""
    cases = []
    for name, parts in known.items():
        own = [part.model_json_schema(ref_template=REFERENCE) for part in parts]
        keys = {key: value for schema in own for key, value in schema.get("properties", {}).items()}
        required = sorted({key for schema in own for key in schema.get("required", ())})
        then: Schema = {"properties": keys | dict.fromkeys(kind.model_fields, True), "additionalProperties": False}
        cases.append(
            {
                "if": {"properties": {"name": {"const": name}}, "required": ["name"]},
                "then": then | ({"required": required} if required else {}),
            }
        )
    properties = section["properties"] | {"name": {"enum": [*sorted(known), None], "default": None}}
    return {"properties": properties, "allOf": cases}
