"""The experiments on data that is not at hand: from raw files of the published formats to a table, in two short rounds.

A round has fewer clients and steps than the experiment's; data, models, methods and settings are the experiment's own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcfed.lab.reproduce.catalogue import experiments
from hpcfed.lab.reproduce.experiment import Case, Content, Experiment, merge
from hpcfed.lab.reproduce.inputs import Places
from hpcfed.lab.reproduce.session import ReproduceSession
from hpcfed.ranks.world import World
from tests.reproduce.raw import write_all

TRIALS = [
    ("fedexp-neural", "emnist"),
    ("fedexp-neural", "cifar10"),
    ("fedexp-neural", "cifar100"),
    ("fedexp-neural", "cinic10"),
    ("fedexp-averaging", "cifar10"),
    ("fedexp-momentum", "cifar100"),
    ("feddyn-cifar10", "dir03-many"),
    ("feddyn-cifar10", "iid-unbalanced"),
    ("feddyn-cifar100", "dir03-unbalanced"),
    ("feddyn-emnist-l", "dir06-1"),
    ("feddyn-mnist", "dir03-10"),
    ("feddyn-shakespeare", "iid-10"),
    ("feddyn-shakespeare", "roles-10"),
    ("feddyn-fedsplit", "tenth"),
    ("feddyn-resnet", "cifar10"),
    ("gel-femnist", "tuned"),
    ("gel-shakespeare", "untuned"),
    ("gel-fedopt", "femnist"),
    ("gel-budgets", "b4-20"),
    ("niid-mnist", "noise"),
    ("pfl-cifar10", "iid-interleaved"),
]


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    with pytest.MonkeyPatch.context() as patch:
        write_all(folder, patch)
    return folder


def shortened(experiment: Experiment) -> Experiment:
    """The experiment with one seed, one evaluation, some 4 clients where they are counted or slow, 1 step or epoch."""
    recipe = experiment.recipe
    short: Content = {"evaluate": {"every": 2}}
    if not experiment.measure.column.startswith("train"):
        short["evaluate"]["train"] = None  # ResNet-18 on all clients takes minutes
    if "size" in recipe.get("cohort", {}):
        short["cohort"] = {"size": 4}
    elif recipe["model"]["name"] == "resnet18-gn":
        short["cohort"] = {"fraction": 0.03}
    if "budget" not in recipe:
        short["local"] = {key: 1 for key in ("steps", "epochs") if key in recipe["local"]}
    cases = {name: _cropped(case) for name, case in experiment.cases.items()}
    return experiment.model_copy(update={"seeds": 1, "recipe": merge(recipe, short), "cases": cases})


def _cropped(case: Case) -> Case:
    """The case with the few samples that the raw files of noise have, where it takes a number of each client's."""
    if "crop" not in case.data.options:
        return case
    options = {**case.data.options, "crop": 5, "test_crop": 3}
    data = case.data.model_copy(update={"clients": 20, "options": options})
    return case.model_copy(update={"data": data})


@pytest.mark.soak
@pytest.mark.parametrize(("name", "case"), TRIALS)
def test_two_rounds_of_every_kind_of_data(name, case, raw, tmp_path):
    experiment = shortened(experiments()[name].limited([case]))
    session = ReproduceSession(World(), Places(tmp_path, raw), "full", rounds=2)
    (present,) = session.available([experiment], prepared=False)
    assert not session.run(session.prepare(present))
    shown = session.show(present)
    cells = [cell for row in shown.table.rows for cell in row]
    assert "not run" not in cells
    assert any(file.suffix == ".png" for file in shown.files)
