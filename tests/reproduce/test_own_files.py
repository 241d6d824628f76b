"""An experiment of one's own: its mistakes end in one line that names file and key, before anything is prepared."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from hpcfed.cli.reproduce import _chosen
from hpcfed.config.limits import Stop
from hpcfed.errors import InputError
from hpcfed.lab.reproduce.catalogue import experiments, find
from hpcfed.lab.reproduce.checks import check
from hpcfed.lab.reproduce.experiment import merge
from hpcfed.lab.reproduce.inputs import Places
from hpcfed.lab.reproduce.measure import criterion_of
from hpcfed.lab.reproduce.plan import lay_out
from tests.launch import ROOT
from tests.mpi.recipes import write_small
from tests.mpi.test_shipped_recipes import cut_down, of_experiments

OWN: dict[str, Any] = {
    "title": "A method beside two others",
    "seeds": 2,
    "recipe": {
        "rounds": 30,
        "model": {"name": "logistic"},
        "local": {"steps": 18, "batch_size": 5, "lr": 0.01},
        "evaluate": {"every": 1, "metrics": ["f1-macro"]},
    },
    "cases": {
        "tuned": {
            "title": "step size 0.01",
            "data": {"source": "leaf-synthetic", "clients": 100},
            "targets": [0.8, 0.7],
            "paper": {"fedavg": [20, 15]},
        },
        "few": {
            "title": "few clients",
            "data": {"source": "leaf-synthetic", "clients": 10},
            "targets": [0.8, {"of": "fedavg", "round": 30}],
            "paper": {"fedavg": ["30+"]},
            "only": ["fedavg", "mine"],
        },
    },
    "methods": {
        "fedavg": {"title": "FedAvg", "recipe": {"algorithm": "fedavg"}},
        "fedexp": {"title": "FedExP", "recipe": {"algorithm": {"name": "fedexp"}}},
        "mine": {"title": "Mine", "recipe": {"algorithm": {"factory": "grads:fedexprox", "mu": 0.1}}},
    },
    "measure": {"kind": "rounds", "reference": "mine", "figures": ["test_accuracy", "test_f1-macro against params"]},
    "small": {"says": "one case", "cases": ["few"], "recipe": {"rounds": 30}},
}
ABSENT = object()


def written(folder: Path, changes: dict[str, Any]) -> Path:
    """Write `OWN` with changed keys; a key is dotted."""
    content = copy.deepcopy(OWN)
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = content
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
        if value is ABSENT:
            del place[last]
    path = folder / "mine.yaml"
    path.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
    return path


MISTAKES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no rounds": ({"recipe.rounds": ABSENT}, ("recipe of 'fedavg' in case 'tuned'", "key 'rounds' is missing")),
    "no model": ({"recipe.model": ABSENT}, ("recipe of 'fedavg' in case 'tuned'", "key 'model' is missing")),
    "a wrong key of a recipe": ({"methods.mine.recipe.lcoal": {}}, ("recipe of 'mine'", "did you mean 'local'")),
    "epochs of no number": (
        {"recipe.local": {"steps": "average_client", "lr": 0.1}},
        ("local.epochs: expected a number, beside 'steps: average_client', got None",),
    ),
    "reference": ({"measure.reference": "mane"}, ("measure.reference: expected a method, got 'mane'", "'mine'")),
    "a method's reference": (
        {"methods.mine.reference": "fedavgg"},
        ("methods.mine.reference: expected a method, got 'fedavgg'; did you mean 'fedavg'",),
    ),
    "only": ({"cases.few.only": ["fedav"]}, ("cases.few.only: expected a method, got 'fedav'", "'fedavg'")),
    "paper's method": ({"cases.few.paper": {"fedav": [1]}}, ("cases.few.paper: expected a method, got 'fedav'",)),
    "a case of the small variant": ({"small.cases": ["fwe"]}, ("small.cases: expected a case", "did you mean 'few'")),
    "a goal's method": (
        {"cases.few.targets": [{"of": "fedexp", "round": 3}]},
        ("cases.few.targets: of: expected a method of the case, got 'fedexp'",),
    ),
    "a goal's round": (
        {"cases.few.targets": [{"of": "fedavg", "round": 300}]},
        ("cases.few.targets: round: expected at most the 30 rounds of 'fedavg', got 300",),
    ),
    "a goal between evaluations": (
        {"recipe.evaluate.every": 4, "cases.few.targets": [{"of": "fedavg", "round": 3}]},
        ("cases.few.targets: round: expected a round that is evaluated, one in 4, got 3",),
    ),
    "a goal at round 0": ({"cases.few.targets": [{"of": "fedavg", "round": 0}]}, ("round", "equal to 1, got 0")),
    "a goal without round": (
        {"cases.few.targets": [{"of": "fedavg"}]},
        ("key 'cases.few.targets.0.goal.round' is missing; add it to the experiment",),
    ),
    "no targets": ({"cases.few.targets": []}, ("cases.few.targets: expected at least one, for kind: rounds",)),
    "percent": ({"cases.few.targets": [80.0]}, ("a share between 0 and 1, got 80; did you mean 0.8?",)),
    "negative": ({"cases.few.targets": [-0.5]}, ("cases.few.targets: expected test_accuracy, a share", "got -0.5")),
    "the paper's numbers": (
        {"cases.tuned.paper.fedavg": [20]},
        ("cases.tuned.paper.fedavg: expected a number per target, 2 in all, got [20]",),
    ),
    "a published mean without deviation": (
        {"measure": {"kind": "published"}, "cases.tuned.paper": {"fedavg": [81.2, None]}},
        ("cases.tuned.paper.fedavg: expected mean and deviation, 2 in all, got [81.2, None]",),
    ),
    "a site's mean in other words": (
        {"measure": {"kind": "sites"}, "small": None, "cases": {
            name: {"title": name, "data": {"source": "leaf-synthetic"}, "paper": {"fedavg": ["0.7 ± 0.1", "0.7 +-"]}}
            for name in ("sites", "pooled")}},
        ("cases.sites.paper.fedavg: expected texts such as '0.731 ± 0.019', got '0.7 +-'",),
    ),
    "a metric without direction": (
        {"recipe.evaluate.metrics": {"my_accuracy": {"whole": "mine:f"}}, "measure.column": "test_my_accuracy",
         "measure.figures": []},
        ("measure.column: 'test_my_accuracy' has no direction; add better: higher or lower to it",),
    ),
    "a column without direction": (
        {"measure.column": "method.my_accuracy", "measure.figures": []},
        ("measure.column: 'method.my_accuracy' has no direction; name a loss, an accuracy or a metric, or one's",),
    ),
    "clients' mean of a metric without direction": (
        {"recipe.evaluate.metrics": {"far": {"whole": "mine:f"}}, "measure.figures": [],
         "measure.column": "clients.global.test.far.mean"},
        ("measure.column: 'clients.global.test.far.mean' has no direction; add better: higher or lower to it",),
    ),
    "a variance": (
        {"measure.column": "clients.global.test.accuracy.variance", "measure.figures": []},
        ("measure.column: 'clients.global.test.accuracy.variance' has no direction",),
    ),
    "window": ({"measure.window": 0}, ("measure.window: expected greater than or equal to 1, got 0",)),
    "last": ({"measure.last": 0}, ("measure.last: expected greater than or equal to 1, got 0",)),
    "models": ({"methods.mine.models": -2}, ("methods.mine.models", "equal to 1, got -2")),
    "clients": ({"cases.few.data.clients": -3}, ("cases.few.data.clients", "equal to 1, got -3")),
    "no case": ({"cases": {}, "small": None}, ("cases: expected at least one, got none",)),
    "no method": ({"methods": {}, "measure": {"kind": "best"}, "cases.tuned.paper": {}, "cases.few.only": []},
                  ("methods: expected at least one, got none",)),
    "recipe of a method in a case": (
        {"cases.tuned.methods": {"fedavg": {"recipe": {"local": {"lr": 0.1}}}}},
        ("no key 'recipe'; cases.tuned.methods.fedavg has a recipe's keys themselves",),
    ),
    "list of seeds": ({"seeds": [0, 5]}, ("seeds: expected how many: 3 runs the seeds 0, 1 and 2, got [0, 5]",)),
    "seed": ({"recipe.seed": 7}, ("seed: expected a stream left to the experiment's 2 seeds", "seeds=1")),
    "sites": ({"measure": {"kind": "sites"}}, ("cases 'sites' and 'pooled' for kind: sites, got tuned, few",)),
    "dynamics": (
        {"measure": {"kind": "dynamics"}, "cases.tuned.paper": {}},
        ("algorithm.name: expected feddyn, for kind: dynamics, got 'fedavg'",),
    ),
    "coefficients": ({"measure": {"kind": "coefficients"}}, ("local.momentum: expected above 0, for kind",)),
    "projections": ({"measure": {"kind": "projections"}}, ("data.test: expected w* or 'solution'", "got 'own'")),
    "column": (
        {"measure.column": "test_acuracy"},
        ("measure.column: expected a column that a run records, got 'test_acuracy'; did you mean 'test_accuracy'",),
    ),
    "figure": ({"measure.figures": ["test_acuracy"]}, ("measure.figures", "did you mean 'test_accuracy'")),
    "figure that is not measured": (
        {"measure.figures": ["train_loss"]},
        ("measure.figures: expected a column that a run records, got 'train_loss'; set evaluate",),
    ),
    "figure's axes": ({"measure.figures": ["test_accuracy vs gradients"]}, ("got 'test_accuracy vs gradients'",)),
    "an axis": ({"measure.figures": ["test_loss against grads"]}, ("got 'grads'; did you mean 'gradients'",)),
    "raw": ({"cases.few.data.raw": "nope"}, ("cases.few.data.raw: expected none", "got 'nope'")),
    "no raw": ({"cases.few.data": {"source": "mnist"}}, ("cases.few.data.raw: expected the folder of its files",)),
    "source": ({"cases.few.data.source": "leaf-sintetic"}, ("cases.few.data.source", "did you mean 'leaf-synthetic'")),
    "partition": ({"cases.few.data.partition": "naturl"}, ("cases.few.data.partition", "did you mean 'natural'")),
    "option": (
        {"cases.few.data.options": {"dimensions": 3}},
        ("cases.few.data.options: expected an option of leaf-synthetic", "did you mean 'dimension'"),
    ),
    "an option's type": (
        {"cases.few.data.options": {"dimension": "ten"}},
        ("cases.few.data.options.dimension: expected a valid integer, got 'ten'",),
    ),
    "a method's name": (
        {"methods.fedavg.recipe": {"algorithm": "fedavgg"}},
        ("recipe of 'fedavg' in case 'tuned': unknown algorithm.name 'fedavgg'; did you mean 'fedavg'",),
    ),
    "a method's key": (
        {"methods.fedavg.recipe": {"algorithm": {"name": "fedavg", "server_lrr": 1.0}}},
        ("recipe of 'fedavg' in case 'tuned'", "server_lrr", "did you mean 'server_lr'"),
    ),
    "a model's name": ({"recipe.model": "logistik"}, ("unknown model.name 'logistik'; did you mean 'logistic'",)),
    "an option of no partition": (
        {"cases.few.data": {"source": "digits", "partition": "iid", "options": {"alpha": 0.3}}},
        ("expected an option of digits or partition iid, got 'alpha'",),
    ),
    "small data": ({"small.data": {"cliants": 3}}, ("small.data: unknown key 'cliants'; did you mean 'clients'",)),
    "small source": ({"small.data": {"source": "digit"}}, ("small.data.source", "did you mean 'digits'")),
    "data in a recipe": (
        {"recipe.data": "a.h5"},
        ("mine.yaml: recipe: expected no 'data' (the data of a case are in cases.NAME.data)",),
    ),
    "output in a recipe": ({"methods.mine.recipe.output": "a"}, ("methods.mine.recipe: expected no 'output'",)),
    "name in a recipe": (
        {"cases.few.methods": {"mine": {"name": "a"}}},
        ("cases.few.methods.mine: expected no 'name'",),
    ),
    "missing keys": (
        {"title": ABSENT, "measure": ABSENT},
        ("keys 'title', 'measure' are missing; add them to the experiment",),
    ),
    "equal titles": ({"methods.mine.title": "FedAvg"}, ("methods: expected a title for each, got 'FedAvg' twice",)),
    "name": ({"name": "a/b"}, ("name: expected letters, digits", "got 'a/b'")),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_before_anything_is_prepared(tmp_path: Path, mistake: str) -> None:
    changes, words = MISTAKES[mistake]
    path = written(tmp_path, changes)
    with pytest.raises(InputError) as caught:
        find(str(path))
    line = str(caught.value)
    assert caught.value.exit_code == 2
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    assert [word for word in words if word not in line] == [], line


def test_without_mistakes_a_file_is_named_like_itself_unless_an_experiment_is(tmp_path: Path) -> None:
    (found,) = find(str(written(tmp_path, {})))
    assert (found.name, found.paper, found.shows, found.cost.full) == ("mine", "own", {}, "")
    path = written(tmp_path, {}).rename(tmp_path / "fedexp-toy.yaml")
    assert find(str(path))[0].name == "own-fedexp-toy"
    assert find(str(ROOT / "jobs" / "recipes" / "fedexp" / "toy.yaml"))[0] == experiments()["fedexp-toy"]


@pytest.mark.parametrize(
    ("metric", "is_larger_better", "unit"),
    [
        ({"whole": "mine:f", "better": "lower"}, False, "number"),
        ({"whole": "mine:f", "better": "higher"}, True, "number"),
        ("balanced-accuracy", True, "fraction"),
        ("auroc", True, "number"),
    ],
)
def test_direction_and_unit_are_the_metrics_and_not_its_names(tmp_path, metric, is_larger_better, unit) -> None:
    metrics = {"my_accuracy": metric}
    changes = {"recipe.evaluate.metrics": metrics, "measure.column": "test_my_accuracy", "measure.figures": []}
    (found,) = find(str(written(tmp_path, changes)))
    criterion = criterion_of(found)
    assert (criterion.higher_is_better, criterion.unit) == (is_larger_better, unit)


@pytest.mark.parametrize(("measure", "is_larger_better"), [("loss", False), ("my_accuracy", True), ("accuracy", True)])
@pytest.mark.parametrize("statistic", ["mean", "worst_decile"])
def test_a_statistic_over_clients_is_better_as_its_measure_is(tmp_path, measure, is_larger_better, statistic) -> None:
    metrics = {"my_accuracy": {"whole": "mine:f", "better": "higher"}}
    column = f"clients.global.test.{measure}.{statistic}"
    changes = {"recipe.evaluate.metrics": metrics, "measure.column": column, "measure.figures": []}
    (found,) = find(str(written(tmp_path, changes)))
    assert criterion_of(found).higher_is_better == is_larger_better


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(
    ("column", "targets", "stop"),
    [
        ("test_accuracy", [0.6, 0.7, {"of": "fedavg", "round": 20}], {"test_accuracy": 0.7}),
        ("test_f1-macro", [0.6, 0.7], {"metric": "f1-macro", "target": 0.7}),
        ("test_loss", [0.6, 0.7], {"metric": "loss", "target": 0.6}),
        ("test_far", [60.0, 70.0], {"metric": "far", "target": 60.0}),
        ("test_loss", [{"of": "fedavg", "round": 20}], {}),
        ("local_loss", [0.6, 0.7], {}),
    ],
)
def test_runs_end_at_the_hardest_target_of_any_measure_on_the_test_set(tmp_path, column, targets, stop, window) -> None:
    metrics = {"f1-macro": "f1-macro", "far": {"whole": "mine:far", "better": "lower"}}
    write_small(tmp_path)
    changes = {
        "cases": {"all": {"title": "all", "data": {"file": "small.h5"}, "targets": targets, "only": ["fedavg"]}},
        "recipe.evaluate.metrics": metrics,
        "measure.column": column,
        "measure.window": window,
        "small": None,
    }
    (found,) = find(str(written(tmp_path, changes)))
    layout = lay_out(found, "full", Places(tmp_path), to_targets=True)
    asked = Stop(**stop, **{"for": window}) if stop else Stop()  # in a row, so that their moving average is there, too
    assert {unit.recipe.stop for unit in layout.plan.units} == {asked}


def test_paths_are_from_the_folder_of_the_file(tmp_path: Path) -> None:
    file = {"data": {"file": "few.h5"}}
    small = {"says": "fewer", "data": {"source": "", "file": "small.h5", "clients": None}}
    content = {
        "cases.few.data": file["data"],
        "small": small,
        "methods.mine.recipe.cohort": {"schedule": "cohorts.json"},
    }
    path = written(tmp_path, content)
    full, fewer = (find(str(path), scale)[0] for scale in ("full", "small"))
    assert full.cases["few"].data.file == str(tmp_path / "few.h5")
    assert full.methods["mine"].recipe["cohort"] == {"schedule": tmp_path / "cohorts.json"}
    assert {case.data.file for case in fewer.cases.values()} == {str(tmp_path / "small.h5")}


def test_a_factory_replaces_a_named_method() -> None:
    named, built = {"algorithm": {"name": "fedprox", "mu": 1.0}}, {"algorithm": {"factory": "mine:Mine"}}
    assert merge(named, built) == built
    assert merge(named, {"algorithm": {"mu": 2.0}}) == {"algorithm": {"name": "fedprox", "mu": 2.0}}


def test_a_seed_means_all_streams_and_a_method_may_be_a_name(tmp_path: Path) -> None:
    (found,) = find(str(written(tmp_path, {"recipe.seed": 7, "seeds": 1})))
    recipe = found.recipe_of(found.cases["few"], "fedavg", "full")
    assert recipe["seed"] == {"model": 7, "cohort": 7, "batches": 7}
    assert recipe["algorithm"] == {"name": "fedavg"}


def test_the_example_of_the_page_is_sound(tmp_path: Path) -> None:
    """It has recipes like those that the project ships."""
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    example = page.split("## An experiment of one's own\n")[1].split("```yaml\n")[1].split("```")[0]
    (tmp_path / "mine.yaml").write_text(example, encoding="utf-8")
    (found,) = find(str(tmp_path / "mine.yaml"))
    assert found.name == "mine"
    known = {json.dumps(cut_down(recipe)["model"]) for _, _, recipe in of_experiments()}
    recipes = [found.recipe_of(case, name, "full") for case in found.cases.values() for name in found.methods_of(case)]
    assert {json.dumps(cut_down(recipe)["model"]) for recipe in recipes} <= known


def test_an_empty_file_is_no_experiment_yet(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("")
    with pytest.raises(InputError, match="an experiment has at least title, cases, methods and measure"):
        find(str(tmp_path / "mine.yaml"))
    with pytest.raises(InputError, match="no such experiment"):
        find(str(tmp_path / "yours.yaml"))


@pytest.mark.parametrize(
    ("scale", "cases", "methods", "words"),
    [
        ("small", ["tuned"], [], "no case 'tuned' here; the small variant has only few"),
        ("full", ["tunet"], [], "did you mean 'tuned'"),
        ("full", ["few"], ["fedexp"], "no method 'fedexp' here; case few has only fedavg, mine"),
        ("small", [], ["fedexp"], "no method 'fedexp' here; the small variant has only fedavg, mine"),
    ],
)
def test_what_a_choice_leaves_out_is_said(tmp_path, scale, cases, methods, words) -> None:
    path = written(tmp_path, {})
    with pytest.raises(InputError, match=words):
        _chosen(str(path), scale, cases, methods, None, Places(tmp_path))


@pytest.mark.parametrize("name", experiments())
def test_the_papers_experiments_have_no_mistakes(name: str) -> None:
    experiment = experiments()[name]
    check(experiment, name)
    assert experiment.shows or experiment.paper == "flamby"
    assert experiment.cost.full
    assert bool(experiment.cost.small) == (experiment.small is not None)
