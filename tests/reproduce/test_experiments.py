"""The experiments' files: each can be prepared and run if its data are there; all tables and figures are covered."""

from __future__ import annotations

import pytest

from hpcfed.lab.reproduce.catalogue import experiments, find
from hpcfed.lab.reproduce.experiment import Data, Experiment, Goal, merge

SHOWN = {
    "fedexp": [
        *(f"table{n}" for n in (1, 3, 4, 5, 6)),
        "section3",
        "section4",
        "sectionc4",
        "sectionf",
        "figure3a",
        *(f"figure{n}" for n in (1, 2, 3, 4, *range(6, 18))),
    ],
    "feddyn": [
        "section3",
        "sectiona2",
        "sectionb1",
        "sectionb2",
        "sectionb3",
        *(f"table{n}" for n in (1, 2, 4, 5, 6)),
        *(f"figure{n}" for n in range(1, 14)),
    ],
    "gel": ["section32", "table1", "table2", "table5", "table6", *(f"figure{n}" for n in range(2, 10))],
}
"""Of each paper, the tables and figures with results; GeL's figure 3 is a formula."""
SCALES = [(name, scale) for name, one in experiments().items() for scale in ("full", "small", "images")
          if scale == "full" or (one.small and (scale == "small" or one.small.images))]  # fmt: skip


def at(name: str, scale: str) -> Experiment:
    """The experiment at a scale; ``images``: in small on a part of CIFAR-10."""
    return experiments()[name].at("full" if scale == "full" else "small", images=scale == "images")


@pytest.mark.parametrize("paper", SHOWN)
def test_every_table_and_figure_of_a_paper_is_shown(paper):
    shown = {item for one in experiments().values() if one.paper == paper for item in one.shows}
    assert shown == set(SHOWN[paper])


@pytest.mark.parametrize(("name", "scale"), SCALES)
def test_every_case_has_what_is_measured(name, scale):
    experiment = at(name, scale)
    for case in experiment.cases.values():
        assert bool(case.targets) == (experiment.measure.kind == "rounds"), case.title
        if experiment.measure.kind == "rounds":
            own = [target for target in case.targets if not isinstance(target, Goal)] or case.targets
            assert {len(numbers) for numbers in case.paper.values()} <= {len(own)}, case.title
            assert case.targets[: len(own)] == own, "the paper's own targets come first"


def test_a_table_of_the_paper_is_made_of_the_cases_that_it_shows():
    found = {experiment.name: list(experiment.cases) for experiment in find("feddyn-table5")}
    assert found["feddyn-mnist"] == ["iid-1", "dir06-1", "dir03-1"]
    data = ("cifar10", "cifar100", "mnist", "emnist-l", "shakespeare", "shakespeare-plays")
    assert set(found) == {f"feddyn-{one}" for one in data}
    assert [experiment.name for experiment in find("gel-femnist")] == ["gel-femnist"]


def test_a_table_in_small_has_its_small_cases_or_else_its_experiments():
    for one in experiments().values():
        for item in one.shows if one.small else ():
            assert all(found.cases for found in find(f"{one.paper}-{item}", "small", images=lambda _: True)), item
    (found,) = find("feddyn-figure11", "small")
    assert list(found.cases) == ["cifar10"]
    mnist = next(found for found in find("feddyn-table5", "small") if found.name == "feddyn-mnist")
    assert list(mnist.cases) == ["dir03-10"]  # it has no small case with 1 % of the clients


def test_cohorts_of_feddyn_are_its_codes():
    for one in experiments().values():
        for case in one.cases.values():
            for method in one.methods_of(case) if one.paper == "feddyn" else ():
                recipe = one.recipe_of(case, method, "full")
                cohort = recipe.get("cohort", {})
                assert ("fraction" in cohort) == (cohort.get("stream") == "authors"), (one.name, case.title)
                assert "fraction" not in cohort or recipe["seed"] == {"cohort": 0}


def test_settings_that_the_papers_texts_and_codes_state():
    every = experiments()
    budgets = [case.recipe["budget"] for case in every["gel-budgets"].cases.values()]
    assert [(one["low"], one["high"]) for one in budgets] == [(4, 20), (25, 50), (50, 75), (10, 100)]
    assert [entry.recipe.get("guess", 0) for entry in every["gel-budgets"].methods.values()] == [0, 10, 100]
    synthetic = every["gel-budgets-synthetic"]
    assert [case.recipe["budget"] for case in synthetic.cases.values()] == budgets
    assert [entry.recipe.get("guess", 0) for entry in synthetic.methods.values()] == [0, 10, 100]
    neural, cifar100 = every["fedexp-neural"], every["feddyn-cifar100"]
    assert neural.recipe_of(neural.cases["emnist"], "scaffold-exp", "full")["algorithm"]["eps"] == 0.1
    assert {one.cases["emnist"].data.source for one in every.values() if "emnist" in one.cases} == {"fed-emnist"}
    assert cifar100.cases["iid-100"].paper["fedavg"] == ["1000+", "1000+"]
    assert {name: case.data.partition for name, case in cifar100.cases.items() if name.startswith("iid")} == {
        "iid-100": "iid-per-class",
        "iid-10": "iid-per-class",
        "iid-1": "iid-per-class",
        "iid-many": "iid-per-class",
        "iid-unbalanced": "iid",
    }
    shakespeare = every["feddyn-shakespeare"].cases["roles-10"].data
    assert (shakespeare.clients, shakespeare.options) == (100, {"crop": 2000, "test_crop": 400})
    dealt = every["feddyn-shakespeare"].cases["iid-10"].data
    assert (dealt.clients, dealt.options) == (100, {**shakespeare.options, "shuffle": True})
    cifar10 = every["feddyn-cifar10"]
    iid = cifar10.recipe_of(cifar10.cases["iid-100"], "feddyn", "full")
    assert (iid["algorithm"]["alpha"], iid["local"]["lr_decay"]) == (0.01, 1.0)
    for one in (cifar10, cifar100):
        scaffold = {name: one.recipe_of(case, "scaffold", "full")["algorithm"] for name, case in one.cases.items()}
        scaled = {name for name, method in scaffold.items() if "c_scale" in method}
        assert scaled == {"iid-unbalanced", "dir03-unbalanced"}
    assert every["feddyn-alpha"].measure.kind == "best"
    letters = every["feddyn-emnist-l"].cases["iid-10"].data.options
    assert letters == {"classes": 10, "normalization": "feddyn"}


def test_a_new_name_replaces_its_section_and_null_takes_a_key_away():
    first = {"model": {"name": "mlp", "hidden": [64]}, "local": {"lr": 0.1, "augment": {"crop": 4}}, "rounds": 3}
    second = {"model": {"name": "logistic"}, "local": {"augment": None, "steps": 2}}
    assert merge(first, second) == {"model": {"name": "logistic"}, "local": {"lr": 0.1, "steps": 2}, "rounds": 3}
    assert merge(first, {"model": {"hidden": [9]}})["model"] == {"name": "mlp", "hidden": [9]}


def test_small_numbers_are_not_compared_with_the_papers():
    small = experiments()["feddyn-mnist"].at("small")
    assert all(case.paper == {} for case in small.cases.values())
    assert isinstance(small.cases["dir03-10"].data, Data)
    assert small.cases["dir03-10"].data.source == "digits"
    images = experiments()["feddyn-cifar10"].at("small", images=True)
    assert (images.name, images.cases["dir03-10"].paper) == ("feddyn-cifar10-cifar10", {})
    assert images.recipe_of(images.cases["dir03-10"], "fedavg", "small")["model"] == {"name": "feddyn-cnn"}
    assert experiments()["feddyn-mnist"].at("small", images=True).name == "feddyn-mnist"
