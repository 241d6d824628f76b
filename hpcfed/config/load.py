"""Reading of a `Recipe` from YAML or a mapping, with ``key=value`` overrides; every mistake is one `InputError`."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter

from hpcfed.config.hints import KEY, at_fault, for_key, for_value, section_of, spelled_out
from hpcfed.config.limits import REAL_RANGE
from hpcfed.config.recipe import Recipe
from hpcfed.errors import InputError, did_you_mean, shown
from hpcfed.io.node import working_folder
from hpcfed.io.text import MAX_YAML_LENGTH, UNPRINTABLE, Malformed, parse_yaml, read_text

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Source = str | Path | Mapping[str, Any]
NO_KEYS: Mapping[str, Any] = MappingProxyType({})
KINDS = ("literal[", "list[")
"""Beginnings of what pydantic puts behind a key that takes values of several kinds."""
EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "is_instance_of": "a path",
    "list_type": "a list",
    "model_type": "a mapping of keys",
    "string_type": "text",
    "too_short": "one entry or more",
    "tuple_type": "a list",
}
"""Type of pydantic's error → words in place of its own, which name classes."""
VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})", re.ASCII)
"""A variable in the syntax of `os.path.expandvars`."""
WORD = re.compile("'([a-z][a-z-]*)'")
"""One of a key's words in what pydantic expected."""
BREAK = re.compile("[\x85\u2028\u2029]")
IN_RECIPE_FOLDER = (("data",), ("secret_seed",), ("model", "init"), ("cohort", "schedule"), ("budget", "schedule"))


def load_recipe(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    keys: Mapping[str, Any] = MappingProxyType({}),
) -> Recipe:
    """Read and check the recipe of one run (see `load_recipes`).

    Raises:
        InputError: naming the key, what was expected and what was found; or the recipe has several ``seeds``.
    """
    recipes = load_recipes(source, overrides, keys)
    if len(recipes) > 1:
        remedy = "give one 'seed'; `hpcfed run` and hpcfed.run_seeds run each"
        raise InputError("seeds", expected="one run", got=f"{len(recipes)} seeds", remedy=remedy)
    return recipes[0]


def load_recipes(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    keys: Mapping[str, Any] = MappingProxyType({}),
) -> list[Recipe]:
    """Read and check a recipe; ``seeds`` in it make several, each with its seed and folder ``<output>/seed-<seed>``.

    Args:
        source: a YAML file, or the same content as a mapping (relative paths then resolve from the working folder).
        overrides: ``section.key=value`` texts, the value in YAML, applied in order.
        keys: sections in place of the source's, before the overrides.

    Raises:
        InputError: naming the key, what was expected and what was found.
    """
    overrides = _listed(overrides)
    if isinstance(source, Mapping):
        where, folder, content = "recipe", working_folder(), _plain(source)
        content.setdefault("name", "run")
    elif not isinstance(source, str | os.PathLike):
        raise InputError("the recipe", expected="the path of a file, or a mapping of keys", got=shown(source))
    else:
        path = Path(source)
        where, folder, content = str(path), path.resolve().parent, read_yaml(path)
        if "cases" in content and "measure" in content:
            remedy = f"hpcfed reproduce {path} --rounds 2 tries it, and leaves each run's recipe in its folder"
            raise InputError("an experiment of many runs", where=where, expected="a recipe", remedy=remedy)
        content.setdefault("name", path.stem)
    content = {key: spelled_out(key, value) for key, value in (content | _plain(keys)).items()}
    streams = content.get("seed")
    if "seeds" in content and isinstance(streams, Mapping) and len({str(streams.get(one, 0)) for one in STREAMS}) > 1:
        remedy = "leave one out: each of 'seeds' is the seed of all streams"
        raise InputError("both 'seeds' and a 'seed' of each stream", where=where, remedy=remedy)
    for override in overrides:
        _override(content, override)
    if "seeds" in content and any(re.match(r"seed\b", override) for override in overrides):
        what = f"'seed' given beside several seeds, {content['seeds']}"
        raise InputError(what, where=where, remedy="leave it out: each of 'seeds' is one 'seed'")
    content.setdefault("python_path", None)
    from_folder(content, folder, where)
    content["output"] = absolute(content.get("output", f"runs/{content['name']}"), working_folder(), where)
    if "seeds" not in content:
        return [_recipe(content, where)]
    seeds, output = _checked_seeds(content.pop("seeds"), where), content["output"]
    return [_recipe({**content, "seed": seed, "output": output / f"seed-{seed}"}, where) for seed in seeds]


def _recipe(content: Mapping[str, Any], where: str) -> Recipe:
    recipe: Recipe = validated(Recipe, content, where)
    return recipe.read_from(where)


def given_twice(overrides: Sequence[str]) -> list[str]:
    """Return the last override, ``key=value``, of each key that has several."""
    keys = [text.partition("=")[0] for text in overrides]
    last = dict(zip(keys, overrides, strict=True))
    return [text for key, text in last.items() if keys.count(key) > 1]


def of_rounds_alone(rounds: int, output: Path) -> tuple[str, ...]:
    """Return overrides that reduce a recipe to training `rounds` rounds, for measurements."""
    nothing_else = (f"evaluate.{what}every=0" for what in ("", "train.", "clients."))
    quoted = str(output).replace("'", "''")
    return f"rounds={rounds}", *nothing_else, "stop={}", "checkpoint={every: 0}", "observers=[]", f"output='{quoted}'"


def to_plain(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain YAML data, paths as text, keys in their documented order."""
    return recipe.model_dump(mode="json", by_alias=True)


def dump_yaml(content: Mapping[str, Any]) -> str:
    """Return plain data as YAML text, keys in their order."""
    stream = io.StringIO()
    yaml = YAML()
    yaml.Representer = _ReadAlike
    yaml.width = 120
    yaml.dump(dict(content), stream)
    return stream.getvalue()


class _ReadAlike(RoundTripRepresenter):
    """The library's writer, for all readers: Unicode's line breaks as escapes, since NEL would be folded to a space,
    and 1.0e-08 with the point, without which YAML 1.1, PyYAML's, has a text."""

    def represent_text(self, text: str) -> ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if BREAK.search(text) else None)

    def represent_number(self, number: float) -> ScalarNode:
        node = self.represent_float(number)
        if "e" in node.value and "." not in node.value:
            node.value = node.value.replace("e", ".0e")
        return node


_ReadAlike.add_representer(str, _ReadAlike.represent_text)
_ReadAlike.add_representer(float, _ReadAlike.represent_number)


def validated(kind: type[BaseModel], content: Mapping[str, Any], where: str, above: str = "") -> Any:
    """Build `kind` from plain data at the key `above`, turning pydantic's first complaint into one `InputError`."""
    prefix = above and f"{above}."
    try:
        section = kind.model_validate(content)
    except ValidationError as error:
        raise _explain(kind, error, where, prefix) from None
    _check_reach(section, where, prefix)
    return section


def _check_reach(section: BaseModel, where: str, prefix: str = "") -> None:
    """Refuse real numbers beyond `REAL_RANGE` in all sections except the user's ``args``."""
    for name, field in type(section).model_fields.items():
        key, value = f"{prefix}{field.alias or name}", getattr(section, name)
        for entry in value if isinstance(value, list | tuple) else [value]:
            if isinstance(entry, BaseModel):
                _check_reach(entry, where, f"{key}.")
            elif isinstance(entry, float) and entry != 0 and not REAL_RANGE[0] <= abs(entry) <= REAL_RANGE[1]:
                expected = f"a magnitude from {REAL_RANGE[0]:g} to {REAL_RANGE[1]:g}, or 0 where that is allowed"
                raise InputError(key, where=where, expected=expected, got=repr(entry))


def _explain(kind: type[BaseModel], error: ValidationError, where: str, prefix: str) -> InputError:
    errors = error.errors()
    missing = [prefix + ".".join(map(str, one["loc"])) for one in errors if one["type"] == "missing"]
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0]) if missing else errors[0]
    first = _of_the_list(first, errors)
    location, found = [str(part) for part in first["loc"] if not str(part).startswith(KINDS)], first["input"]
    dotted, noun = (prefix + ".".join(location)).removesuffix("."), getattr(kind, "noun", "recipe")
    dotted, found = at_fault(dotted, found)
    if first["type"] == "extra_forbidden":
        remedy = for_key(kind, _section(kind, location[:-1]), location)
        return InputError(f"unknown key {dotted!r}", where=where, remedy=remedy)
    if first["type"] == "missing" and len(missing) > 1:
        what = f"keys {', '.join(map(repr, missing))} are missing"
        return InputError(what, where=where, remedy=f"add them to the {noun}")
    if first["type"] == "missing":
        example = ", such as algorithm: {name: fedavg}" if dotted == "algorithm" else ""
        return InputError(f"key {dotted!r} is missing", where=where, remedy=f"add it to the {noun}{example}")
    expected = " or ".join(dict.fromkeys(map(_expected, _alternatives(first, errors))))
    if not dotted and first["type"] == "value_error":  # of keys in several sections, which the words name
        return InputError("", where=where, expected=expected)
    got = shown(found) if not isinstance(found, Mapping) else f"the keys {', '.join(map(str, found)) or '(none)'}"
    got = got if dotted else ""  # of the whole recipe: all its keys, those of our own making among them
    inner = _section(kind, location) if first["type"] == "model_type" and location else None
    better, remedy = for_value(dotted, first["type"], found, inner)
    if not remedy and expected == EXPECTED["list_type"] and _takes(kind, location, [found]):
        remedy = f"did you mean {[found]}?"
    if not remedy and isinstance(found, str):
        remedy = did_you_mean(found, WORD.findall(expected))
    dotted = dotted.removesuffix(KEY)
    return InputError(dotted or noun, where=where, expected=better or expected, got=got[:200], remedy=remedy)


def _takes(kind: type[BaseModel], location: Sequence[str], value: Any) -> bool:
    """Return whether the type of the key at `location` takes the value."""
    fields = _section(kind, location[:-1]).model_fields
    found = (field.annotation for name, field in fields.items() if location[-1] in (name, field.alias))
    annotation: Any = next(found, None)
    try:
        return annotation is not None and TypeAdapter(annotation).validate_python(value) is not None
    except ValidationError:
        return False


def _of_the_list(first: ErrorDetails, errors: Sequence[ErrorDetails]) -> ErrorDetails:
    """Return the complaint about a list's entry, where a key takes a word or a list and has a list."""
    if first["type"] != "literal_error" or not isinstance(first["input"], list):
        return first
    key = first["loc"][:-1]
    inner = (one for one in errors if one["loc"][: len(key)] == key and isinstance(one["loc"][-1], int))
    return next(inner, first)


def _alternatives(first: ErrorDetails, errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Return all complaints about a value that may be a word or a number: of one alternative each."""
    key, alternative = first["loc"][:-1], first["loc"][-1:]
    if first["type"] != "literal_error" or not "".join(map(str, alternative)).startswith(KINDS):
        return [first]
    return [one for one in errors if one["loc"][:-1] == key]


def _expected(error: ErrorDetails) -> str:
    said = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return EXPECTED.get(error["type"], said)


def _section(kind: type[BaseModel], location: Sequence[str]) -> type[BaseModel]:
    """Find the model class that a dotted location lies in."""
    for part in location:
        if part.isdecimal():  # a place in a list of sections
            continue
        field = kind.model_fields.get(part)
        kind = (field and section_of(field.annotation)) or kind
    return kind


def _checked_seeds(seeds: Any, where: str) -> list[int]:
    whole = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        remedy = f"seed={seeds} runs one, seeds=[0, 1, 2] each of them" if type(seeds) is int else ""
        expected = "a list of different whole numbers from 0"
        raise InputError("seeds", where=where, expected=expected, got=shown(seeds), remedy=remedy)
    return seeds


STREAMS = ("model", "cohort", "batches")


REQUIRED_KEYS = "data, model, rounds, local and algorithm"
"""Keys that every recipe has."""


def read_yaml(path: Path, noun: str = "recipe", least: str = REQUIRED_KEYS) -> dict[str, Any]:
    """Return the mapping in a YAML file, a `noun` with at least the keys `least`.

    Raises:
        InputError: the file does not exist or cannot be read, or holds no YAML mapping.
    """
    try:
        text = read_text(path, MAX_YAML_LENGTH, pipes=True)
    except FileNotFoundError:
        raise InputError(f"no such {noun}", where=str(path), remedy="check the path") from None
    except IsADirectoryError:
        raise InputError(f"is a folder, not {_a(noun)}", where=str(path), remedy="name the YAML file") from None
    except (OSError, ValueError) as error:  # ValueError: text that is no path, too
        remedy = "" if isinstance(error, OSError) else f"{_a(noun)} is a YAML file in UTF-8"
        raise InputError(f"cannot be read as text ({error})", where=str(path), remedy=remedy) from None
    try:
        content = parse_yaml(text)
    except Malformed as error:
        joint = " at" if str(error).startswith("line ") else ":"
        raise InputError(f"not valid YAML{joint} {error}", where=str(path)) from None
    if content is None:
        remedy = f"{_a(noun)} has at least {least}"
        raise InputError("an empty file", where=str(path), expected="a mapping of keys", remedy=remedy)
    if not isinstance(content, dict):
        is_text = isinstance(content, str)
        got, remedy = shown(content) if is_text else type(content).__name__, "a space follows the colon of 'key: value'"
        raise InputError(
            _a(noun), where=str(path), expected="a mapping of keys", got=got, remedy=remedy if is_text else ""
        )
    return content


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _plain(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _as_yaml_has_it(value) for key, value in content.items()}


def _as_yaml_has_it(value: Any) -> Any:
    """Return mappings as dictionaries and tuples as lists, also those in lists."""
    if isinstance(value, Mapping):
        return _plain(value)
    return [_as_yaml_has_it(entry) for entry in value] if isinstance(value, list | tuple) else value


def _listed(overrides: Any) -> list[str]:
    """Return overrides as a list.

    Raises:
        InputError: they are one text, a mapping, or not all texts.
    """
    is_list = isinstance(overrides, Iterable) and not isinstance(overrides, str | Mapping)
    texts = list(overrides) if is_list else [overrides]
    if not is_list or not all(isinstance(text, str) for text in texts):
        remedy = "such as ['rounds=3', 'local.lr=0.1']"
        raise InputError("overrides", expected="a list of texts section.key=value", got=shown(overrides), remedy=remedy)
    return texts


def _override(content: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InputError("override", expected="section.key=value", got=shown(text))
    *sections, last = key.split(".")
    place: Any = content
    for section in sections:
        inner = place[_index(place, section, text)] if isinstance(place, list) else place.setdefault(section, {})
        if not isinstance(inner, dict | list):
            raise InputError(f"override {text!r}", expected=f"{section!r} to be a section", got=shown(inner))
        place = inner
    try:
        given = parse_yaml(value)
    except Malformed as error:
        raise InputError(f"override {shown(text)}", expected="a YAML value after '='", got=str(error)) from None
    value_at = _index(place, last, text) if isinstance(place, list) else last
    if given is None and _has_default(key):
        place.pop(last, None)
    else:
        place[value_at] = spelled_out(key, given)
    if comment := _comment(value):
        what, remedy = f"override {shown(text)}", "quote the value, twice for the shell: \"name='try #1'\""
        raise InputError(what, expected="a value without a comment", got=shown(comment), remedy=remedy)


def _index(entries: list[Any], part: str, text: str) -> int:
    """Return the place of an entry of a list, which an override's key names by its number, from 0.

    Raises:
        InputError: there is no such entry.
    """
    if not (part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(entries)):
        expected = f"the number of an entry, 0 to {len(entries) - 1}" if entries else "a list with entries"
        raise InputError(f"override {text!r}", expected=expected, got=repr(part))
    return int(part)


def _has_default(key: str) -> bool:
    """Whether a dotted key may be left out, and null is none of its values: as an override, null means its default."""
    kind: Any = Recipe
    field: Any = None
    for part in key.split("."):
        field = kind.model_fields.get(part) if isinstance(kind, type) and issubclass(kind, BaseModel) else None
        if field is None:
            return False
        kind = field.annotation
    return not field.is_required() and type(None) not in get_args(kind)


def _comment(value: str) -> str:
    """Return what YAML leaves out of a value, from `` #`` on; "" if nothing."""
    for found in re.finditer(r"(?:^|\s)#", value):
        with suppress(Malformed):  # within quotes
            if parse_yaml(value[: found.start()]) == parse_yaml(value):
                return value[found.start() :].strip()
    return ""


def from_folder(part: dict[str, Any], folder: Path, where: str) -> None:
    """Make the paths in a recipe, or in some of its keys, absolute from a folder.

    Raises:
        InputError: a path names a variable that is not set.
    """
    for keys in IN_RECIPE_FOLDER:
        _resolve_path(part, keys, folder, where)
    if "python_path" in part:
        part["python_path"] = _folders(part["python_path"], folder, where)


def _resolve_path(content: dict[str, Any], keys: Sequence[str], folder: Path, where: str) -> None:
    """Make the path at `keys`, if any, absolute from the recipe's folder."""
    place: Any = content
    for key in keys[:-1]:
        place = place.get(key) if isinstance(place, dict) else None
    if isinstance(place, dict) and isinstance(place.get(keys[-1]), str | Path):
        place[keys[-1]] = absolute(place[keys[-1]], folder, where)


def _folders(entries: Any, folder: Path, where: str) -> Any:
    return (
        [absolute(entry, folder, where) for entry in entries or [folder]]
        if isinstance(entries or [], list)
        else entries
    )


def absolute(text: Any, folder: Path, where: str) -> Any:
    """Return a path from a folder, with ``~`` and variables expanded; anything but text as it is.

    Raises:
        InputError: it names a variable that is not set, or a home folder that is not known, or is no text.
    """
    if not isinstance(text, str | Path):
        return text
    there, rest = _as_written(folder, str(text))
    expanded = os.path.expandvars(rest)
    if "$" in VARIABLE.sub(lambda found: "$" if found[0].strip("${}") not in os.environ else "", rest):
        raise InputError(f"path {text!s}", where=where, expected="every $VARIABLE to be set", got=there + expanded)
    try:
        path = os.path.normpath(folder / Path(there + expanded).expanduser())
    except RuntimeError:  # of ``~name``; of ``~`` without $HOME and an entry in passwd
        remedy = "write the path out"
        raise InputError(f"path {text!s}", where=where, expected="a home folder that is known", remedy=remedy) from None
    return in_utf8(path, where)


def in_utf8(path: str, where: str) -> Path:
    """Return a path that a recipe can name: the run of another would end, and none could read its recipe again.

    Raises:
        InputError: it is not in UTF-8.
    """
    if UNPRINTABLE.search(path):
        what, remedy = "a path in UTF-8", "rename the file or folder, or set a locale of UTF-8"
        raise InputError("path", where=where, expected=what, got=path, remedy=remedy)
    return Path(path)


def _as_written(folder: Path, text: str) -> tuple[str, str]:
    """Split a path after its longest prefix with a ``$`` that exists as written: there the ``$`` is no variable."""
    parts = text.split("/")
    for count in range(len(parts), 0, -1):
        there = "/".join(parts[:count])
        if "$" in there and os.path.lexists(folder / there):
            return there, text[len(there) :]
    return "", text
