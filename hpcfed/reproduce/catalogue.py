"""All experiments there are, and which of them a table or figure of a paper is made of."""

from __future__ import annotations

from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from hpcfed.config.load import read_yaml, validated
from hpcfed.errors import InputError, nearest
from hpcfed.reproduce.experiment import Experiment

FOLDER = "experiments"


@cache
def experiments() -> dict[str, Experiment]:
    """Return every experiment by its name, in the order of papers and files.

    Raises:
        InputError: a file is not what `Experiment` describes.
    """
    found = {}
    root = resources.files("hpcfed.reproduce") / FOLDER
    for paper in sorted((entry for entry in root.iterdir() if entry.is_dir()), key=lambda entry: entry.name):
        for file in sorted(paper.iterdir(), key=lambda entry: entry.name):
            experiment = read(file, paper.name)
            found[experiment.name] = experiment
    return found


def read(file: Traversable, paper: str) -> Experiment:
    """Read one experiment's file.

    Raises:
        InputError: naming the key, what was expected and what was found.
    """
    with resources.as_file(file) as path:
        content = {"name": f"{paper}-{path.stem}", "paper": paper, **read_yaml(path)}
        return validated(Experiment, content, str(path))


def find(name: str) -> list[Experiment]:
    """Return what is named: an experiment, its file, or a paper's table or figure, with the cases that it is made of.

    A file says itself which ``paper`` it belongs to, unless its folder is named so.

    Raises:
        InputError: nothing has that name, or the file is not what `Experiment` describes.
    """
    if name.endswith((".yaml", ".yml")):
        return [read(Path(name), Path(name).resolve().parent.name)]
    every = experiments()
    if name in every:
        return [every[name]]
    items = {f"{one.paper}-{item}": None for one in every.values() for item in one.shows}
    if name not in items:
        raise InputError(f"no experiment {name!r}", remedy=nearest(name, [*every, *items]))
    paper, _, item = name.partition("-")
    made_of = [one for one in every.values() if one.paper == paper and item in one.shows]
    return [one.limited(one.shows[item]) for one in made_of]
