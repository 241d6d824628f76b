"""``hpcfed schema``: it accepts the recipes that the loader accepts, and describes every key."""

from __future__ import annotations

import json
import re

import pytest
from jsonschema import Draft202012Validator

from hpcfed import algorithms, updates
from hpcfed.cli.schema import of_experiment, of_recipe
from hpcfed.config import elsewhere
from hpcfed.config.load import load_recipe, to_plain
from hpcfed.config.meanings import keys
from hpcfed.config.recipe import Recipe
from hpcfed.errors import InputError
from hpcfed.io.text import parse_yaml
from tests.launch import ROOT
from tests.mpi.recipes import METHODS, small

pytestmark = pytest.mark.one_mpi
RECIPE = Draft202012Validator(of_recipe())
RECIPES = ROOT / "jobs" / "recipes"


def test_the_command_prints_what_lies_beside_the_recipes(command, tmp_path):
    for arguments, kept in ((["schema"], "recipe"), (["schema", "--experiment"], "experiment")):
        printed = command(arguments, tmp_path).stdout
        Draft202012Validator.check_schema(json.loads(printed))
        path = RECIPES / f"{kept}.schema.json"
        assert printed == path.read_text(encoding="utf-8"), f"hpcfed {' '.join(arguments)} > {path.name}"


def test_every_shipped_file_names_its_schema_and_fits():
    paths = sorted(path for paper in RECIPES.iterdir() if paper.is_dir() for path in paper.resolve().glob("*.yaml"))
    assert len(paths) > 30
    for path in paths:
        text = path.read_text(encoding="utf-8")
        content = parse_yaml(text)
        schema = of_experiment() if "cases" in content else of_recipe()
        named = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
        assert named, path
        assert (path.parent / named[1]).exists()
        Draft202012Validator(schema).validate(content)


@pytest.mark.parametrize("name", algorithms.names())
def test_a_complete_recipe_of_every_method_fits(name, tmp_path):
    recipe = small(tmp_path / "run", algorithm={"name": name, **METHODS[name]}, seeds=[0, 1], stop={"for": 1})
    RECIPE.validate(recipe)
    del recipe["seeds"]
    RECIPE.validate(to_plain(load_recipe(recipe)))


@pytest.mark.parametrize(
    "change",
    [
        {"rouns": 1},
        {"rounds": 0},
        {"seed": -1},
        {"watchdog": "5"},
        {"watchdog": 5},
        {"watchdog": "0.0 s"},
        {"checkpoint": {"every": "0h"}},
        {"local": {"lr": "fast"}},
        {"local": {"batch_size": 0}},
    ],
    ids=str,
)
def test_what_the_loader_refuses_does_not_fit(change):
    assert not RECIPE.is_valid(small("run", **change))
    with pytest.raises(InputError):
        load_recipe(small("run", **change))


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": {"name": "feddyn"}},
        {"algorithm": {"name": "fedexp", "ep": 1}},
        {"model": {"name": "mlp", "hiden": []}},
    ],
    ids=str,
)
def test_wrong_parameters_of_methods_and_models_do_not_fit(change):
    assert not RECIPE.is_valid(small("run", **change))


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({"algorithm": "fedavg", "model": "mlp", "loss": "squared", "cohort": 3, "observers": "wandb"}, True),
        ({"algorithm": "mine:method", "model": "mine:net", "loss": "mine:loss", "cohort": 0.5}, True),
        ({"observers": ["tensorboard", "mine:Class", {"factory": "mine:Class"}]}, True),
        ({"observers": {"name": "wandb", "args": {"project": "mine"}}}, True),
        ({"algorithm": "feddyn"}, False),  # alpha has no default
        ({"algorithm": "fedavgg"}, False),
        ({"loss": "hinge"}, False),
        ({"cohort": 1.5}, False),
        ({"observers": ["csv"]}, False),
    ],
    ids=str,
)
def test_short_forms_fit(change, fits):
    assert RECIPE.is_valid(small("run", **change)) == fits
    if fits:
        load_recipe(small("run", **change))


def test_names_have_letters_of_any_script():
    for name in ("Köln 2", "Łódź", "Αθήνα", "東京.1"):
        RECIPE.validate(to_plain(load_recipe(small("run", name=name))))
    for name in ("a/b", "-a", "a×b", "a∕b", "a\u200b"):
        assert not RECIPE.is_valid(small("run", name=name))
        with pytest.raises(InputError, match="name: expected letters, digits, spaces and"):
            load_recipe(small("run", name=name))


def test_every_key_is_described_in_a_cell_that_can_be_read():
    described, hidden = [*keys()], {"data_content", "python_path", "secret_commitment"}
    assert {key.dotted for key in described if key.section is Recipe} == {*Recipe.model_fields} - hidden
    assert all(5 < len(key.meaning) <= 200 for key in described)
    schema = of_recipe()
    places = [schema["properties"], *(section.get("properties", {}) for section in schema["$defs"].values())]
    assert sum("description" in entry for place in places for entry in place.values()) > len({*described}) - 20
    assert not [
        name for name, entry in schema["properties"].items() if not entry.get("description") and name not in hidden
    ]


def test_names_of_other_programs_are_answered_by_keys_and_methods_that_exist():
    places = {remedy.split("'")[1] for remedy in elsewhere.KEYS.values() if remedy.startswith("did you mean '")}
    assert len(places) > 20
    for place in sorted(places):
        assert "unknown key" not in _refusal(f"{place}=[]"), place
    named = {word for remedy in elsewhere.METHODS.values() for word in re.findall(r"\bfed[a-z]+|\bdsgd", remedy)}
    assert named <= {*algorithms.names()}
    means = [remedy.partition(": ")[2] for remedy in elsewhere.METHODS.values() if "means=" in remedy]
    assert len(means) > 4
    assert all(updates.build(load_recipe(RECIPES / "demo" / "fedavg.yaml", [one])).means for one in means)
    parts = [part for method in algorithms.names() for part in algorithms.parts_of(method) if part]
    assert elsewhere.PARAMETERS.keys() <= {name for part in parts for name in part.model_fields}
    assert not elsewhere.KEYS.keys() & {key.lower() for key in of_recipe()["properties"]}, "a key of ours is no other's"


def test_the_words_of_the_page_on_other_programs_are_answered():
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    theirs = [text for cell in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) for text in re.findall(r"`(.*?)`", cell)]
    words = {word for text in theirs for word in re.findall(r"(?<![\w.])(-[a-z]+|[a-z]+(?:_[a-z]+)+)(?![\w.])", text)}
    similar = {"algo": "algorithm", "evaluate_fn": "evaluate", "lr": "local.lr", "mu": "algorithm.mu"}
    keys = {word.strip("-") for word in words} - {*similar, "simulate_one_user", "process_aggregated_statistics"}
    assert len(keys) > 25
    assert not [key for key in sorted(keys) if elsewhere.KEYS[elsewhere.letters_of(key)] not in _refusal(f"{key}=1")]
    for word, key in similar.items():
        assert f"did you mean '{key}'?" in _refusal(f"{word}=1")


def _refusal(override: str) -> str:
    """Return why an override of a recipe is refused, "" if it is not."""
    try:
        load_recipe(RECIPES / "demo" / "fedavg.yaml", [override])
    except InputError as error:
        return str(error)
    return ""
