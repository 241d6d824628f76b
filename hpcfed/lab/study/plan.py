"""The plan of a study: its recipe, data, splits and runs, all checked before the first run starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.tables.standardize import CLIENT, check_standardize
from hpcfed.assembly import build_loss, resolve
from hpcfed.config.load import load_recipes
from hpcfed.config.recipe import Recipe, Seeds
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError, counted
from hpcfed.io.node import working_folder
from hpcfed.lab.study.arms import (
    ENSEMBLE,
    OF_THE_WAY,
    PERSONALISED,
    TRAVELLING,
    Arm,
    TrainingAmount,
    make_arms,
    recipe_of,
    shared_parameters,
    training_amount,
)
from hpcfed.lab.study.federations import files_of
from hpcfed.lab.study.labels import TestedLabels, tested_labels
from hpcfed.lab.study.measures import ACCURACY, StudyMetric, metrics_of, with_metrics
from hpcfed.lab.study.methods import Methods, parse_methods
from hpcfed.lab.study.options import StudyOptions, check_options, parse_baselines
from hpcfed.lab.study.samples import SiteSamples, read_samples
from hpcfed.lab.study.splits import HOLDOUT, SITE_OUT, Splits, inner_split, make_splits
from hpcfed.lab.study.tuning import Tuning, TuningResult, naming_tune, parse_tuning, variants
from hpcfed.lab.sweep.grid import Point
from hpcfed.lab.sweep.plan import Plan, Unit

PAGE, TABLES, FIGURES, DATA, SWEEP, TUNING = "study.html", "tables", "figures", "data", "sweep", "tuning"
"""Entries of a study's folder."""


@dataclass(frozen=True)
class StudyPlan(Plan):
    """The plan of a study's runs, as a sweep in which each arm is a point; `splits` is the number of splits."""

    splits: int = 1

    def __str__(self) -> str:
        seeds = len({unit.seed for unit in self.units})
        return f"{counted(len(self.points), 'arm')} × {counted(self.splits, 'split')} × {counted(seeds, 'seed')}"

    def labelled(self, recipe: Recipe) -> tuple[str, dict[str, Any]]:
        """Return a method's name and recipe; for a baseline, whose rounds train one client each, without weights."""
        label, plain = super().labelled(recipe)
        return (label, plain) if recipe.cohort.schedule is None else ("the baselines", plain | {"weights": None})


@dataclass(frozen=True)
class Study:
    """A study whose options and data have been read; nothing is written yet.

    Attributes:
        folder: the study's folder.
        recipe: the recipe, with the study's metrics.
        metrics: the scalar metrics, the main one first.
        samples: the samples of all sites.
        splits: the splits of the samples.
        options: the options; ``standardize`` has its default filled in.
        methods: the methods of ``--methods``.
        baselines: names of the chosen baselines, without ``ensemble`` if the task is survival.
        seeds: seeds of the runs.
        amount: the amount of a federated run's training.
        shared: the baselines' ``parameters`` section (see `shared_parameters`).
        tuning: the grids of ``--tune``; None if nothing is tuned.
        tuned: the tuned values; None before tuning has ended, or if nothing is tuned.
        variants: arms of an inner study (see `inner`), one per arm and point of its grid; None in an ordinary study.
    """

    folder: Path
    recipe: Recipe
    metrics: tuple[StudyMetric, ...]
    samples: SiteSamples
    splits: Splits
    options: StudyOptions
    methods: Methods
    baselines: tuple[str, ...]
    seeds: tuple[Seeds, ...]
    amount: TrainingAmount
    shared: dict[str, Any]
    tuning: Tuning | None = None
    tuned: TuningResult | None = None
    variants: tuple[Arm, ...] | None = None

    @property
    def leaves_out(self) -> bool:
        """Whether each split leaves one site out."""
        return self.options.kind == SITE_OUT

    @property
    def arms(self) -> list[Arm]:
        """The arms: one recipe each, trained on each split and seed."""
        if self.variants is not None:
            return list(self.variants)
        return make_arms(self.methods.each, self.methods.reference, self.baselines, self.samples.sites, self.amount)

    @property
    def ratio(self) -> float:
        """Ratio of test to training samples, n_test / n_train, mean over splits."""
        return float(np.mean([split.ratio for split in self.splits.each]))

    @cached_property
    def tested_labels(self) -> TestedLabels | None:
        """The label values that occur among test samples; None unless the task is classification or multi-label."""
        return tested_labels(self.samples, self.splits)

    @property
    def remarks(self) -> list[str]:
        """Lines for the user: on methods, sites, strata, metrics and tuning."""
        found = [*self.methods.remarks, *self.samples.remarks, *self.splits.remarks]
        main, *others = self.metrics
        if main.name == ACCURACY and others and self.tested_labels is not None:
            missing = self.tested_labels.missing(self.samples.sites)
            what = f"accuracy is the main metric, since {others[0].in_text} is defined in no split at any site"
            found.append(f"{what}; labels that tested samples lack: {missing}")
        if self.tuning is not None and main.without_direction:
            found.append(f"{main.without_direction}, so tuned by loss")
        if self.tuned is not None and (by_loss := self.tuned.by_loss(main)):
            found.append(by_loss)
        if self.leaves_out and self.options.standardize == CLIENT:
            found.append("the site that is left out is scaled by the training samples of all others, not by its own")
        if self.leaves_out and PERSONALISED in self.baselines:
            found.append("personalised models are left out: a site that is left out has no training samples")
        sites = len(self.trainers(0))
        if ENSEMBLE in parse_baselines(self.options.baselines) and ENSEMBLE not in self.baselines:
            found.append("the ensemble is left out: log hazards of separate Cox models have no common scale")
        apart = [name for name in OF_THE_WAY if getattr(self.recipe, name)]
        apart += ["local.noise"] if self.recipe.local.noise is not None else []
        if apart and self.baselines:
            found.append(f"{' and '.join(apart)}: of the federated methods alone, not of the baselines")
        for arm in self.arms:
            if self.leaves_out and arm.personal:
                found.append(f"{arm.title}: the common model is tested, since a site that is left out trains none")
            if arm.kind == TRAVELLING and arm.rounds < sites:
                found.append(
                    f"{arm.title}: visits {arm.rounds} of {sites} sites, since it has fewer rounds than there are sites"
                )
        return found

    def trainers(self, split: int) -> list[int]:
        """Return the indices of the sites that train in a split."""
        return self.splits.each[split].trainers(self.samples.owner)

    def inner(self) -> Study:
        """Return the inner study, on which values are tuned.

        Its splits are holdouts of this study's training parts; each of its arms is one of this study's arms at one
        point of the arm's grid.

        Raises:
            InputError: a site has too few training samples; the message names ``--tune``.
        """
        assert self.tuning is not None
        samples, options = self.samples, self.options
        with naming_tune():
            splits = [
                inner_split(split, number, samples.divisible, options.test_fraction, options.split_seed)
                for number, split in enumerate(self.splits.each)
            ]
        inner = Splits(tuple(splits))
        return replace(
            self,
            folder=self.folder / TUNING,
            splits=inner,
            amount=_amount(self.recipe, samples, inner),
            options=replace(options, kind=HOLDOUT),
            seeds=self.seeds[:1],
            variants=tuple(variants(self.arms, self.tuning)),
            tuning=None,
        )

    def about(self) -> dict[str, Any]:
        """Return the settings that determine the splits' files, as stored in ``study.yaml``."""
        options, kind = self.options, self.options.kind
        return {
            "data_content": self.samples.content,
            "kind": kind,
            "splits": len(self.splits.each),
            **({"test_fraction": options.test_fraction} if kind == HOLDOUT else {}),
            **({"split_seed": options.split_seed} if kind != SITE_OUT else {}),
            "standardize": options.standardize,
            **({"fill": self.samples.dataset.fill} if self.samples.dataset.fill else {}),
            **({"grouped_by": self.samples.grouped_by} if self.samples.group is not None else {}),
        }

    def run_name(self, arm: Arm, split: int, seed: Seeds) -> str:
        """Return the name of a run, which is also its folder's name."""
        return f"{arm.key}.split-{split}.seed-{seed.model}"

    def run_folder(self, arm: Arm, split: int, seed: Seeds) -> Path:
        """Return the folder of a run."""
        return self.folder / SWEEP / "runs" / self.run_name(arm, split, seed)

    def plan(self) -> StudyPlan:
        """Return the plan of all runs, in the order of splits; the splits' files must have been written.

        Raises:
            InputError: a recipe cannot be run; the message names its arm.
        """
        units, arms = [], self.arms
        for split in range(len(self.splits.each)):
            files, trainers = files_of(self.folder / DATA, split), self.trainers(split)
            for seed in self.seeds:
                for point, arm in enumerate(arms):
                    if arm.site is None or arm.site in trainers:
                        data = files.pooled if arm.pools else files.sites
                        units.append(self._unit(arm, point, split, seed, trainers, data))
        points = tuple(Point((), ()) for _ in arms)
        return StudyPlan(self.folder.name, self.folder / SWEEP, (), points, tuple(units), len(self.splits.each))

    def check(self) -> None:
        """Check every arm on the recipe's federation file, before the splits' files are written.

        Raises:
            InputError: a recipe cannot be run; the message names its arm.
        """
        import torch

        trainers = self.trainers(0)
        with Federation.open(self.recipe.data) as federation:
            for arm in self.arms:
                if arm.site is None or arm.site in trainers:
                    recipe = self._unit(arm, 0, 0, self.seeds[0], trainers, self.recipe.data).recipe
                    if self.leaves_out and recipe.parameters.keeps_private:
                        what = f"private parts with --kind {SITE_OUT}: the site that is left out has none"
                        remedy = "leave parameters out of the recipe, or take another --kind"
                        raise InputError(what, where=arm.title, remedy=remedy)
                    try:
                        build_loss(recipe, federation, torch.float32, torch.device("cpu"))
                    except InputError as error:
                        raise InputError(str(error), where=arm.title) from None

    def _unit(self, arm: Arm, point: int, split: int, seed: Seeds, trainers: Sequence[int], data: Path) -> Unit:
        run = {
            "name": arm.key,
            "seed": seed.model_dump(),
            "data": str(data),
            "output": str(self.run_folder(arm, split, seed)),
        }
        if self.tuned is not None:
            arm = replace(arm, overrides=(*arm.overrides, *self.tuned.overrides(arm.key, split)))
        try:
            recipe = resolve(recipe_of(arm, self.recipe, self.amount, split, self.shared, trainers, run))
        except InputError as error:
            raise InputError(str(error), where=arm.title) from None
        return Unit(self.run_name(arm, split, seed), point, str(seed.model), recipe)


def _amount(recipe: Recipe, samples: SiteSamples, splits: Splits) -> TrainingAmount:
    """Return the amount of training that a recipe sets, from the sizes of the splits' training parts."""
    sizes = [np.bincount(samples.owner[split.training]) for split in splits.each]
    return training_amount(recipe, [of_split[of_split > 0] for of_split in sizes])


def _read_recipe(
    source: str | Path, overrides: Sequence[str], options: StudyOptions
) -> tuple[Recipe, tuple[Seeds, ...]]:
    """Return the recipe of the first seed, with the output of all seeds' runs, and all seeds."""
    rounds = [] if options.rounds is None else [f"rounds={options.rounds}"]
    seeded = [f"seeds={list(options.seeds)}"] if options.seeds else []
    recipes = load_recipes(source, [*overrides, *rounds, *seeded])
    several = len(recipes) > 1 or options.seeds
    first = recipes[0].model_copy(update={"output": recipes[0].output.parent}) if several else recipes[0]
    return first, tuple(recipe.seed for recipe in recipes)


def _metrics(recipe: Recipe, samples: SiteSamples, splits: Splits, *, are_default: bool) -> tuple[StudyMetric, ...]:
    """Return the scalar metrics, the main one first: accuracy before a default metric that is undefined everywhere."""
    found, labels = metrics_of(recipe, samples.dataset.task), tested_labels(samples, splits)
    if are_default and found[0].needs_all_labels and labels and labels.lack_some_everywhere:
        return found[-1], *found[:-1]
    return tuple(found)


def read_study(source: str | Path, overrides: Sequence[str], options: StudyOptions) -> Study:
    """Read and check a study's recipe, data and options.

    Raises:
        InputError: an option, the recipe or the data are invalid.
    """
    check_options(options)
    first, seeds = _read_recipe(source, overrides, options)
    baselines = parse_baselines(options.baselines)
    methods = parse_methods(options.methods, first, {text.partition("=")[0] for text in options.tune})
    if first.bits == "portable":
        remedy = "leave bits out: a study measures and fine-tunes by the libraries"
        raise InputError("bits: portable in a study", where=str(source), remedy=remedy)
    samples = read_samples(first.data)
    if first.data_content not in (None, samples.content):
        raise InputError(
            "data_content", where=str(first.data), expected=first.data_content, got=samples.content or "none"
        )
    first = first.model_copy(update={"data_content": None})  # splits are new files
    scale = options.standardize or samples.scale
    check_standardize(samples.dataset, scale)
    options = replace(options, standardize=scale)
    fraction, seed = options.test_fraction, options.split_seed
    splits = make_splits(options.kind, samples.divisible, options.splits or 5, fraction, seed)
    recipe = with_metrics(first, samples.dataset.task, samples.dataset.num_classes)
    folder = options.output or first.output.with_name(f"{first.output.name}-study")
    if samples.dataset.task == "survival":  # log hazards of separate models have no common scale
        baselines = tuple(one for one in baselines if one != ENSEMBLE)
    study = Study(
        folder=Path(os.path.normpath(working_folder() / folder)),
        recipe=recipe,
        metrics=_metrics(recipe, samples, splits, are_default=not first.evaluate.metrics),
        samples=samples,
        splits=splits,
        options=options,
        methods=methods,
        baselines=baselines,
        seeds=seeds,
        amount=_amount(recipe, samples, splits),
        shared=shared_parameters(recipe),
        tuning=parse_tuning(options.tune, methods.each),
    )
    study.check()
    if study.tuning is not None:
        inner = study.inner()
        with naming_tune():
            inner.check()
    return study
