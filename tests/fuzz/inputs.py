"""Text at random: hypothesis draws the structure and makes a failure small."""

from __future__ import annotations

import json
from collections.abc import Iterator

from hypothesis import strategies as st
from pydantic import BaseModel

from hpcfed import algorithms
from hpcfed.config.load import dump_yaml
from hpcfed.config.recipe import Recipe
from hpcfed.io.text import Malformed, parse_yaml
from hpcfed.models import named
from tests.mpi.recipes import METHODS, small

REMARKABLE = (
    *(
        0,
        -1,
        1,
        2,
        7,
        10**9,
        10**9 + 1,
        2**31,
        2**63,
        10**30,
        0.0,
        -0.0,
        0.5,
        1.0,
        1e-30,
        1e-320,
        1e15,
        1e38,
        1e39,
        1e308,
    ),
    *(True, False, None, "", "a", "full", "auto", "none", "10min", "1e3h", "9" * 400, "../x", "/dev/null", "/dev/zero"),
    *(
        "$HOME",
        "$(id)",
        "a\nb",
        "\x1b[31m",
        "\u202e",
        "nan",
        "~nobody",
        "a" * 5000,
        [],
        {},
        [[]],
        [0, 0],
        [1, 2, 3],
        ["a"],
    ),
    *({"a": 1}, {"name": "a"}, {"factory": "os:getcwd"}),
)
RAW = (
    *(
        "!!python/name:os.system x",
        "!!set {a}",
        "!!binary aGk=",
        "2024-01-01",
        "12:30:45",
        f"0x{'f' * 40}",
        ".nan",
        ".inf",
    ),
    *(
        "-.inf",
        "1e999",
        "1" * 5000,
        "[" * 70 + "]" * 70,
        "&a [*a]",
        "*a",
        "{<<: 1}",
        "? a",
        "- - 1",
        "|\n  a",
        '"\\ud800"',
    ),
    *('"\\0"', '"\\UFFFFFFFF"', "{1: 2}", "{[a]: b}", "@", "`", "%", "\t", "'", '"', "{", "]", "#", "a: b", "a: b: c"),
    *("\x00", "\x85", "\ufeff", "\ud800", "=", "<<", "!", "!!", "!!int x", "!!str", "!!map [1]", "~", "0o17", "1_000"),
    *(
        "\nb: &b {x: 1}\nc: {<<: *b}",
        "%YAML 1.1\n---\n",
        "---\n",
        "...\n",
        ",",
        "- ",
        "\n",
        " ",
        "{a: ",
        "[1, ",
        "&x ",
        "*x ",
    ),
)
"""YAML as only a person or an enemy writes it."""


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the keys of a section and of those in it, dotted."""
    for name, field in section.model_fields.items():
        yield prefix + (field.alias or name)
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys_of(kind, f"{prefix}{name}.")


KEYS = sorted({*keys_of(Recipe), "seeds", "absent", "a.b.c", ".", "model.hidden", "model.bias", "model.layers"})
PARAMETERS = sorted(
    {key for method in METHODS.values() for key in method} | {"tau", "beta1", "beta2", "eps_decay", "x"}
)

plain = st.recursive(
    st.sampled_from(REMARKABLE) | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
words = st.sampled_from(
    ("linear", "mlp", "lstm", "sequential", "batched", "uniform", "bernoulli", "adam", "skip", "fast")
)
values = st.one_of(
    st.sampled_from(REMARKABLE).map(json.dumps),
    plain.map(json.dumps),
    st.sampled_from(RAW),
    st.integers(1, 5).map(str),
    words,
    st.text(max_size=12),
)
"""What stands behind a key, as YAML."""
methods = st.builds(
    lambda name, changed: json.dumps({"name": name, **METHODS.get(name, {}), **changed}),
    st.sampled_from(algorithms.names()),
    st.dictionaries(st.sampled_from(PARAMETERS), st.floats(0, 2) | st.sampled_from(REMARKABLE), max_size=2),
).map(lambda text: f"algorithm={text}")
models = st.builds(
    lambda name, changed: "model=" + json.dumps({"name": name, **changed}),
    st.sampled_from(sorted(named())),
    st.dictionaries(st.sampled_from(("hidden", "layers", "bias", "embedding", "groups")), plain, max_size=1),
)
cohorts = st.builds(
    lambda fraction, sampling: f"cohort={{fraction: {fraction!r}, sampling: {sampling}}}",
    st.floats(0, 1) | st.sampled_from((1e-12, 1e-30, 1e-320)),
    st.sampled_from(("uniform", "bernoulli")),
)
overrides = st.one_of(
    st.builds(lambda key, value: f"{key}={value}", st.sampled_from(KEYS), values), methods, models, cohorts, st.text()
)

numbers = st.builds(
    lambda key, value: f"{key}={value!r}",
    st.sampled_from([f"local.{key}" for key in ("lr", "lr_decay", "weight_decay", "momentum", "clip_norm")]),
    st.floats(1e-30, 1e15) | st.floats(0, 2, exclude_min=True) | st.sampled_from((1e-30, 1e-20, 1e8, 1e15)),
)
sound = st.lists(methods | models | cohorts | numbers | numbers | overrides, min_size=1, max_size=3)
"""Overrides that mostly go through, to values at the ends of what is allowed."""


def _written(changes: dict[str, str]) -> str:
    """Return a sound recipe as YAML with the values of some keys replaced, and others added."""
    sound = {key: json.dumps(value) for key, value in small(None).items()}
    return "".join(f"{key}: {value}\n" for key, value in (sound | changes).items())


tokens = st.lists(st.sampled_from((*RAW, "a: ", "rounds: 3\n", "data: ", *KEYS[:40])) | values, max_size=12).map(
    "".join
)
yaml_texts = st.one_of(
    st.dictionaries(st.sampled_from([key for key in KEYS if "." not in key]), values, max_size=3).map(_written),
    tokens,
    tokens.map(lambda text: _written({}) + text),
    st.text(),
)


def _as_recipe(changes: list[str]) -> str:
    """Return a sound recipe with overrides written into it."""
    content = small(None)
    for change in changes:
        keys, _, value = change.partition("=")
        *sections, last = keys.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        try:
            place[last] = parse_yaml(value)
        except Malformed:
            place[last] = value
    return json.dumps(content)


nearly_sound = st.lists(numbers | cohorts | models | methods, min_size=1, max_size=2).map(_as_recipe)
recipe_texts = st.integers(0, 2).flatmap(lambda number: nearly_sound if number else yaml_texts)
site_values = {
    "modules": st.lists(st.sampled_from(("gcc/13", "openmpi/5.0", "a b", "$(id)", "-x", "")), max_size=3),
    "setup": st.sampled_from(("", "source ~/v/bin/activate\n", "a: b", "2024-01-01")) | st.text(max_size=9),
    "launch": st.sampled_from(("srun --mpi=pmix", "", "a 'b", "null", None)) | st.text(max_size=9),
    "python": st.sampled_from(("python3", "~/v/bin/python", None)),
    "options": st.dictionaries(
        st.sampled_from(("account", "partition", "a b", "-x")), st.sampled_from((None, 3, "p7"))
    ),
    "requeue": st.booleans() | st.sampled_from(("yes", "no", 1)),
}
site_texts = st.one_of(
    st.fixed_dictionaries({}, optional=site_values).map(json.dumps),
    st.fixed_dictionaries({}, optional=site_values).map(lambda keys: dump_yaml(keys)),
    yaml_texts,
)
json_texts = st.one_of(
    plain.map(json.dumps),
    st.lists(st.lists(st.integers(-1, 6), max_size=5), max_size=4).map(json.dumps),
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), min_size=2, max_size=3).map(json.dumps),
    st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5), min_size=2, max_size=3).map(json.dumps),
    st.lists(st.sampled_from(("[", "]", "{", "}", ",", ":", "0", "1e9", '"a"', '"', "NaN", "-", "null", *RAW))).map(
        "".join
    ),
    st.sampled_from(("[" * 100_000, "[" * 65 + "]" * 65, "1" * 400, "1" * 5000, '{"a":' * 70 + "1" + "}" * 70)),
    st.text(),
)
