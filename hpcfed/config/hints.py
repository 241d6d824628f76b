"""Short forms of recipe sections, and remedies for unknown keys, refused values and unknown methods."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any

from pydantic import BaseModel

from hpcfed.config import registry
from hpcfed.config.elsewhere import KEYS, METHODS, OPTIMIZERS, PARAMETERS, PLACES, SHORT_OPTIONS, VALUES, letters_of
from hpcfed.config.metrics import BUILT_IN, DIRECTIONS
from hpcfed.config.updates import ChainPart
from hpcfed.errors import did_you_mean, nearest

KEY = ".[key]"
"""What pydantic appends to the place of a mapping's entry whose key, not its value, is refused."""
METRICS = "evaluate.metrics."
TRUTH = dict.fromkeys(("true", "yes", "on", "1"), "true") | dict.fromkeys(("false", "no", "off", "0"), "false")
"""What is written for true and false elsewhere → YAML 1.2's."""
NUMBERS = ("int_type", "float_type")
"""pydantic's types of the error where a number is expected."""
SIMILAR = 0.6
"""Similarity from which an unknown key counts as a known one: below it are words such as goal and local."""
LIKELY = 0.8
"""Similarity from which an unknown name counts as a misspelt method rather than another method."""


def spelled_out(key: str, value: Any) -> Any:
    """Return a section from its short form: ``algorithm: fedavg``, ``model: mlp``, ``loss: squared``, ``cohort: 5``.

    Text with a colon is a factory, ``package.module:function``; a cohort that is no whole number is a fraction.
    """
    if key in ("algorithm", "model", "loss") and isinstance(value, str):
        return {"factory" if ":" in value else "name": value}
    if key == "cohort" and isinstance(value, int | float) and not isinstance(value, bool):
        return {"size" if isinstance(value, int) else "fraction": value}
    return value


def for_key(root: type[BaseModel], section: type[BaseModel], location: Sequence[str]) -> str:
    """Return a remedy for an unknown key: its places elsewhere, its name here, or the most similar key.

    At the top of a recipe what other programs call so comes first: ``clients`` is their number there.
    """
    key = location[-1]
    known = [field.alias or name for name, field in section.model_fields.items()]
    is_recipe = {"algorithm", "model"} <= root.model_fields.keys()
    said = KEYS.get(letters_of(key)) if is_recipe else None
    if said and len(location) == 1:
        return said
    if slip := did_you_mean(key, known, LIKELY):  # of the pen, not of the place
        return slip
    if section is ChainPart:
        return f"keys of a part stand below its name: {location[0]}: [{{NAME: {{{key}: …}}}}]"
    places = [path for path in _paths(root) if letters_of(path[-1]) == letters_of(key)]
    found = [".".join(path) for path in places if len(path) == min(map(len, places))]
    if is_recipe:
        entries = _entries().items()
        found += [f"{section}.{key}" for section, kinds in entries if any(key in kind.model_fields for kind in kinds)]
    if found:
        return f"did you mean {' or '.join(map(repr, found))}?"
    return said or did_you_mean(key, known, SIMILAR) or f"known: {', '.join(sorted(known))}"


def for_option(option: str, root: type[BaseModel]) -> str:
    """Return a remedy for an unknown option that is a key of a recipe, or what is one elsewhere; "" for another."""
    name = option.lstrip("-")
    word = letters_of(SHORT_OPTIONS.get(name, name))
    if word in KEYS and word not in PLACES:
        return KEYS[word]
    paths = [path for path in _paths(root) if word in (letters_of(path[-1]), letters_of(".".join(path)))]
    found = [".".join(path) for path in paths if len(path) == min(map(len, paths))]
    found = [PLACES[word]] if word in PLACES else found
    return f"a key of the recipe has no dashes: {' or '.join(f'{key}=…' for key in found)}" if found else ""


def for_parameter(key: str, known: Iterable[str]) -> str:
    """Return a remedy for a parameter that a method lacks: what it is called here, the most similar, else all."""
    known = sorted(known)
    meant = [name for name, words in PARAMETERS.items() if name in known and letters_of(key) in words.split()]
    return f"did you mean {meant[0]!r}?" if meant else for_slip(key) or nearest(key, known)


def for_value(path: str, kind: str, value: Any, section: type[BaseModel] | None) -> tuple[str, str]:
    """Return (expected, remedy) for a refused value; empty texts if pydantic's message suffices.

    Args:
        path: the dotted key.
        kind: pydantic's type of the error.
        section: class of the section expected there; None for other values.
    """
    if path == "seeds" and isinstance(value, list):  # of an experiment
        return "how many: 3 runs the seeds 0, 1 and 2", ""
    if path == "seed" and isinstance(value, list):
        return "one seed", f"seeds={_short(value)} runs each"
    if path == "seed" and not isinstance(value, Mapping):
        return "a whole number from 0, or one each for model, cohort and batches", ""
    if kind == "string_pattern_mismatch" and path == "name":
        return "letters, digits, spaces and . _ -, a letter or digit first", ""
    if kind == "string_pattern_mismatch" and path.startswith(METRICS) and path.endswith(KEY):
        own = f"name it: [{{{value.rpartition(':')[2]}: '{value}'}}]" if ":" in str(value) else ""
        return "a name of letters, digits, _ and -, a letter first", own
    if path == "name" and kind == "string_type" and isinstance(value, int | float):
        return "", f"put it in quotes: name: '{value}'"
    if path == "local.lr_schedule" and kind == "tuple_type":
        return "a list, such as [{round: 51, lr: 0.05}]", ""
    if path == "local.step" and isinstance(value, int):
        return "'module:function', a step of yours", f"did you mean 'local.steps={value}'?"
    if kind == "string_pattern_mismatch" and (path.endswith("factory") or path == "local.step"):
        return "'module:function'", "a function of yours, in a file beside the recipe or in a package"
    if path == "local.optimizer" and letters_of(str(getattr(value, "__name__", value))) in OPTIMIZERS:
        return "", "another optimizer is a step of yours: local.step (docs/methods.md)"
    if path == "loss.name" and letters_of(str(value)) in ("l2", "mse", "mseloss"):
        return "", "torch's mean squared error is loss=torch.nn:MSELoss; squared is ½‖·‖²"
    if path == "loss.weights" and kind == "literal_error":
        return "'balanced', 'balanced-by-site' or a list of numbers, one for each class", ""
    if path.startswith(METRICS) and kind == "value_error":
        return "", _for_metric(value)
    if isinstance(value, str) and (word := VALUES.get(path, {}).get(letters_of(value))):
        return "", f"did you mean {word!r}?"
    if meant := _meant("float_type" if path == "cohort" else kind, value):
        quoted = isinstance(value, str) and value.strip().lower() == meant
        return "", f"did you mean {meant}{', without quotes' if quoted else ''}?"
    if kind in NUMBERS and (several := _several(value)):
        return "one number", f"several are a sweep: hpcfed sweep … -g {path}={several}"
    if section is not None and not isinstance(value, Mapping):
        keys = [field.alias or name for name, field in section.model_fields.items()]
        return "a mapping of keys", f"{path}.{keys[0]}=…; its keys: {', '.join(keys)}"
    return "", ""


def _meant(kind: str, value: Any) -> str:
    """Return the number or truth value that a value of another type was meant as, as YAML has it; "" if none."""
    if kind == "bool_type":
        return TRUTH.get(str(value).lower(), "")
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"{value:.0f}"
    if kind in NUMBERS and isinstance(value, str):
        text = value.strip().replace("\u2212", "-")  # the minus of a typeset page
        text = text.replace(",", ".") if kind == "float_type" else text
        with suppress(ValueError, OverflowError):
            if kind == "float_type" and text.endswith("%"):
                text = f"{float(text[:-1]) / 100:g}"
            return text if isfinite((int if kind == "int_type" else float)(text)) else ""
    return ""


def _several(value: Any) -> str:
    """Return numbers in a list, or separated by commas, as the values of a grid; "" for anything else."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    parts = [str(one).strip() for one in parts]
    with suppress(ValueError):
        return ",".join(parts) if len(parts) > 1 and all(isfinite(float(one)) for one in parts) else ""
    return ""


def at_fault(path: str, value: Any) -> tuple[str, Any]:
    """Return the key and value to name in a message: of a metric with an unknown direction the direction's."""
    if path.startswith(METRICS) and isinstance(value, Mapping) and value.get("better") not in (None, *DIRECTIONS):
        return f"{path}.better", value["better"]
    return path, value


def _for_metric(value: Any) -> str:
    """Return a remedy for what is no metric: the nearest built-in one, or the nearest key of one's own; "" for none."""
    if isinstance(value, Mapping):
        keys = ("whole", "sum", "better")
        unknown = [str(key) for key in value if key not in keys]
        return did_you_mean(unknown[0], keys) if unknown else ""
    if not isinstance(value, str):
        return ""
    return "leave it out: it is measured anyway" if value in ("accuracy", "loss") else did_you_mean(value, BUILT_IN)


def for_slip(key: str) -> str:
    """Return a remedy for a misspelt ``name`` or ``factory``, keys of all models and methods; "" for another key."""
    return did_you_mean(key, ("name", "factory"), 0.7)


def for_method(name: str, known: Iterable[str]) -> str:
    """Return a remedy for an unknown method: its entry in `METHODS`, else a similar name, else all known ones."""
    said = METHODS.get(letters_of(name))
    known = sorted(known)
    likely = difflib.get_close_matches(name.lower(), known, n=1, cutoff=LIKELY)
    return said or (nearest(name.lower(), likely) if likely else f"known: {', '.join(known)}")


def _entries() -> dict[str, list[type[BaseModel]]]:
    """Return the classes whose fields are keys of ``algorithm`` and of ``model``.

    Imported by name, and only for a wrong recipe: these packages import this one.
    """
    methods = [registry.entry("hpcfed.algorithms", name) for name in registry.names("hpcfed.algorithms")]
    parts = [getattr(method, role, None) for role in ("LOCAL", "NORMALIZE", "SERVER") for method in methods]
    models = registry.tables("hpcfed.models.architectures", "MODELS")
    return {"algorithm": [part for part in parts if part is not None], "model": [*models.values()]}


def _paths(kind: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the key paths of a section and its subsections."""
    for name, field in kind.model_fields.items():
        yield (*above, field.alias or name)
        if (inner := section_of(field.annotation)) is not None:
            yield from _paths(inner, (*above, field.alias or name))


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class in a field's annotation, or None."""
    kinds = (annotation, *getattr(annotation, "__args__", ()))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) < 40 else "[…]"
