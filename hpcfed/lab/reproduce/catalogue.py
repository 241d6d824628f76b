"""The catalogue of experiments, and the papers' tables and figures that they reproduce."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from hpcfed.config.load import absolute, from_folder, read_yaml, validated
from hpcfed.errors import InputError, did_you_mean
from hpcfed.lab.reproduce.experiment import OWN_PAPER, Experiment

FOLDER = "experiments"
REQUIRED_KEYS = "title, cases, methods and measure"
"""Keys of an experiment's file, as errors name them."""


def experiments() -> dict[str, Experiment]:
    """Return name → experiment for the whole catalogue, sorted by paper and file name.

    Raises:
        InputError: a file does not fit the schema `Experiment`.
    """
    return {name: _experiment(name) for name in _files()}


@cache
def _experiment(name: str) -> Experiment:
    """Return the catalogue's experiment of that name; cached, since reading all files takes seconds."""
    file, paper = _files()[name]
    return read(file, name, paper)


@cache
def _files() -> dict[str, tuple[Traversable, str]]:
    """Return experiment name → its file and its paper's name, sorted by paper and file name."""
    found = {}
    root = resources.files("hpcfed.lab.reproduce") / FOLDER
    for paper in sorted((entry for entry in root.iterdir() if entry.is_dir()), key=lambda entry: entry.name):
        for file in sorted(paper.iterdir(), key=lambda entry: entry.name):
            found[f"{paper.name}-{Path(file.name).stem}"] = file, paper.name
    return found


def read(file: Traversable, name: str, paper: str = OWN_PAPER) -> Experiment:
    """Read an experiment's file; `name` and `paper` apply if the file does not set them.

    Raises:
        InputError: the file does not fit the schema `Experiment`; the message names the key, the expected and the
            actual value.
    """
    with resources.as_file(file) as path:
        content = {"name": name, "paper": paper, **read_yaml(path, Experiment.noun, REQUIRED_KEYS)}
        return validated(Experiment, content, str(path))


def read_own(path: Path) -> Experiment:
    """Read and check a user's experiment file; relative paths in it start in the file's folder.

    If it sets no name, the experiment is named like the file, or ``own-<file>`` if the catalogue has an experiment of
    that name. A file of the catalogue keeps the catalogue's name.

    Raises:
        InputError: the file does not fit the schema `Experiment`, or its keys contradict each other; the message names
            the key, the expected and the actual value.
    """
    from hpcfed.lab.reproduce.checks import check

    for name, (file, paper) in _files().items():
        if isinstance(file, Path) and file.resolve() == path.resolve():
            return read(file, name, paper)
    experiment = read(path, f"{OWN_PAPER}-{path.stem}" if path.stem in _files() else path.stem)
    check(experiment, str(path))
    return _with_paths(experiment, path.resolve().parent, str(path))


def _with_paths(experiment: Experiment, folder: Path, where: str) -> Experiment:
    """Return the experiment with absolute paths; relative paths start in its file's folder, as in a recipe."""
    experiment.recipe.setdefault("python_path", None)
    for part in experiment.recipe_parts():
        from_folder(part, folder, where)
    for small in experiment.small_sections():
        if small.data.get("file"):
            small.data["file"] = str(absolute(small.data["file"], folder, where))
    cases = {}
    for name, case in experiment.cases.items():
        file = str(absolute(case.data.file, folder, where)) if case.data.file else ""
        cases[name] = case.model_copy(update={"data": case.data.model_copy(update={"file": file})})
    return experiment.model_copy(update={"cases": cases})


def find(name: str, scale: str = "full", *, images: Callable[[Experiment], bool] = lambda _: False) -> list[Experiment]:
    """Return the experiments that a name stands for, at a scale.

    An experiment of a paper's table or figure is limited to the cases shown there; a small variant that has none of
    these cases keeps all of its own.

    Args:
        name: an experiment's name, the path of a YAML file, or a paper's table or figure, ``<paper>-<item>``.
        scale: ``full`` or ``small``.
        images: function of a small variant on images that returns whether its data are available; if not, the small
            variant without images is returned.

    Raises:
        InputError: nothing has that name, the file is invalid, or there is no small variant.
    """

    def scaled(one: Experiment) -> Experiment:
        return one.at(scale, images=images(one.at(scale, images=True)))

    if name.endswith((".yaml", ".yml")):
        return [scaled(read_own(Path(name)))]
    files = _files()
    if name in files:
        return [scaled(_experiment(name))]
    paper, _, item = name.partition("-")
    of_paper = [_experiment(one) for one, (_, its_paper) in files.items() if its_paper == paper]
    if made_of := [scaled(one) for one in of_paper if item in one.shows]:
        return [one.limited([case for case in one.shows[item] if case in one.cases]) for one in made_of]
    every = experiments()
    items = {f"{one.paper}-{item}": None for one in every.values() for item in one.shows}
    if name in {one.paper for one in every.values()}:
        expected = "one of its experiments, tables or figures"
        raise InputError(f"{name} is a paper", expected=expected, remedy=f"see --list {name}")
    raise InputError(f"no experiment {name!r}", remedy=did_you_mean(name, [*every, *items]) or "see --list")
