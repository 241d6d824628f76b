"""Every recipe that the project ships or shows has, cut down, the same bits on all ranks as in a world of one.

A recipe keeps its model, method, loss, kind of batches and of cohorts, and client optimizer, on a small federation of
its data's kind; rounds, steps and sizes are reduced, and step sizes such that random data do not diverge.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcfed.io.text import parse_yaml
from hpcfed.lab.reproduce.catalogue import experiments
from tests.federations import write_federation
from tests.launch import ROOT
from tests.mpi.test_same_result import check_same_as_alone

pytestmark = pytest.mark.one_mpi

KINDS: Mapping[str, tuple[tuple[int, ...], int | None, str]] = {
    "colours": ((3, 16, 16), 10, "classification"),
    "images": ((16, 16), 10, "classification"),
    "digits": ((8, 8), 10, "classification"),
    "tokens": ((9,), 30, "next-token"),
    "vectors": ((60,), 10, "classification"),
    "numbers": ((11,), None, "regression"),
    "heart": ((13,), 1, "multi-label"),
    "survival": ((39,), None, "survival"),
}
"""Shape of a sample, classes and task."""
KIND_OF: Mapping[str, str] = {
    **dict.fromkeys(("cifar10", "cifar100", "cinic10"), "colours"),
    **dict.fromkeys(("mnist", "fashion-mnist", "emnist-letters", "fed-emnist", "femnist"), "images"),
    **dict.fromkeys(("shakespeare", "leaf-shakespeare"), "tokens"),
    **dict.fromkeys(("leaf-synthetic", "feddyn-synthetic", "fcube", "magic"), "vectors"),
    **dict.fromkeys(("linear-regression", "toy2d"), "numbers"),
    "flamby-heart-disease": "heart",
    "flamby-tcga-brca": "survival",
}
"""By the source of an experiment's data."""
FILES = {"digits.h5": "digits", "heart.h5": "heart", "mnist-dir0.3-100.h5": "images"}
"""By the file that a recipe names."""
ELSEWHERE = {"hospitals.h5"}
"""Files of recipes with a module that their page shows; tests/docs runs them."""
LARGE = {"resnet18-gn"}
SIZES = 11, 9, 7, 12, 6, 16


def cut_down(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with little work."""
    found = {key: recipe[key] for key in recipe if key not in ("data", "output", "name", "stop", "seed")}
    local, has_budget = dict(found["local"]), "budget" in found
    local = {key: local[key] for key in local if key != "lr_schedule"} | {"lr": 0.01}
    if local.get("steps"):
        local["steps"] = 4 if has_budget else 2  # which may be a formula of the data
        local["epochs"] = None
    elif local.get("epochs"):
        local["epochs"] = 1
    if isinstance(size := local.get("batch_size", 50), int):
        local["batch_size"] = min(5, size)
    if has_budget:
        found["budget"] = {"low": 1, "high": 3}
    cohort = dict(found["cohort"]) if isinstance(found.get("cohort"), Mapping) else {}
    if "size" in cohort:
        cohort["size"] = min(4, cohort["size"])
    if "fraction" in cohort:
        cohort["fraction"] = 0.5
    evaluate = {key: one for key, one in found.get("evaluate", {}).items() if key != "metrics"} | {"every": 1}
    return found | {"rounds": 3, "local": local, "cohort": cohort, "evaluate": evaluate, "device": "cpu"}


def shown() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the place, the kind of data and the content of each recipe of a page and jobs/recipes."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    texts = {page: re.findall(r"^```yaml\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S) for page in pages}
    found = {f"{page.name} {n}": parse_yaml(one) for page in pages for n, one in enumerate(texts[page])}
    folders = [ROOT / "jobs" / "recipes" / name for name in ("demo", "mnist")]
    found |= {f"{path.parent.name} {path.stem}": parse_yaml(path.read_text("utf-8"))
              for folder in folders for path in sorted(folder.glob("*.yaml"))}  # fmt: skip
    for name, recipe in found.items():
        if {"data", "model", "local"} <= recipe.keys() and (file := Path(recipe["data"]).name) not in ELSEWHERE:
            yield name, FILES[file], recipe


def of_experiments() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield those of the experiments; what is tuned has some value."""
    for name, experiment in experiments().items():
        for title, case in experiment.cases.items():
            for method in experiment.methods_of(case):
                recipe = experiment.recipe_of(case, method, "full")
                if (algorithm := recipe["algorithm"]).get("name") == "fedprox":
                    recipe = recipe | {"algorithm": {"mu": 0.1, **algorithm}}
                yield f"{name} {title} {method}", KIND_OF[case.data.source], recipe


def cases() -> Iterator[object]:
    """Yield all recipes that differ when cut down.

    Those whose model, method, and kind of data are each in one before, and large ones, are for the soak.
    """
    known: set[str] = set()
    for name, kind, recipe in [*shown(), *of_experiments()]:
        small = cut_down(recipe)
        model, method = _parts_of(small)
        whole = json.dumps((kind, small), sort_keys=True, default=str)
        first = {whole, f"of {kind}", f"model {model}", f"method {method}", f"guess {'guess' in small}"} - known
        if whole in first:
            usual = len(first) > 1 and model not in LARGE
            yield pytest.param(kind, small, id=name, marks=[] if usual else pytest.mark.soak)
        known |= first


def _parts_of(recipe: Mapping[str, Any]) -> list[str]:
    """Return the names of a recipe's model and method."""
    return [part if isinstance(part, str) else part["name"] for part in (recipe["model"], recipe["algorithm"])]


def write(folder: Path, kind: str) -> Path:
    """Write a small federation of a kind."""
    (shape, classes, task), draws = KINDS[kind], np.random.default_rng(1)

    def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = draws.normal(size=(count, *shape)).astype(np.float32)
        if task == "next-token":
            x = draws.integers(classes, size=(count, *shape), dtype=np.uint8)
        y = {
            "regression": draws.normal(size=count).astype(np.float32),
            "multi-label": draws.integers(2, size=(count, 1), dtype=np.uint8),
            "survival": np.stack([np.arange(count) % 2, draws.exponential(size=count)], 1).astype(np.float32),
        }
        return x, y.get(task, draws.integers(classes or 2, size=count, dtype=np.uint8))

    clients = [samples(size) for size in SIZES]
    return write_federation(
        folder / f"{kind}.h5", clients, num_classes=classes, test=samples(8), content=kind, task=task
    )


@pytest.mark.every(3)
@pytest.mark.parametrize(("kind", "recipe"), list(cases()))
def test_a_shipped_recipe_is_the_same_as_alone(kind, recipe, world, shared_tmp):
    world.on_root(lambda: write(shared_tmp, kind) and None)
    check_same_as_alone(world, shared_tmp, {**recipe, "data": str(shared_tmp / f"{kind}.h5")})
