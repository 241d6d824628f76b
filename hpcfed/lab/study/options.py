"""The options of ``hpcfed study``, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcfed.errors import InputError, nearest
from hpcfed.lab.study.arms import BASELINES
from hpcfed.lab.study.splits import FOLDS, HOLDOUT, KINDS, SITE_OUT

MOST_SPLITS = 1000
TEST_FRACTION = 0.2
LEAST_RESAMPLES, MOST_RESAMPLES = 100, 100_000


@dataclass(frozen=True)
class StudyOptions:
    """The options of ``hpcfed study``.

    Attributes:
        methods: names of methods with settings, see `parse_methods`.
        kind: kind of the splits, one of `KINDS`.
        splits: number of holdouts or folds, None for 5; must be None if each split leaves one site out.
        fraction: share of a site's samples in the test part of a holdout, the inner one for tuning included; None for
            `TEST_FRACTION`.
        split_seed: seed of the splits.
        seeds: seeds of the runs; empty for the recipe's seeds.
        baselines: comma-separated names, ``all`` or ``none``.
        standardize: ``client``, ``pooled`` or ``none``; None: as in the federation file.
        rounds: rounds of a federated run; None for the recipe's number.
        tune: grids of values to tune, see `parse_tuning`.
        bootstrap: number of resamples of patients, 0 for none.
        output: the study's folder; None for the recipe's ``output`` with ``-study`` appended.
    """

    methods: str
    kind: str = "holdout"
    splits: int | None = None
    fraction: float | None = None
    split_seed: int = 0
    seeds: Sequence[int] = ()
    baselines: str = "all"
    standardize: str | None = None
    rounds: int | None = None
    output: Path | None = None
    tune: Sequence[str] = ()
    bootstrap: int = 0

    @property
    def test_fraction(self) -> float:
        """Share of a site's samples in the test part of a holdout, and of the inner holdout for tuning."""
        return TEST_FRACTION if self.fraction is None else self.fraction


def check_options(options: StudyOptions) -> None:
    """Check the options on splits and resamples.

    Raises:
        InputError: a value is out of range, or an option has no effect in this combination.
    """
    if options.kind not in KINDS:
        raise InputError(f"--kind {options.kind!r}", remedy=nearest(options.kind, KINDS))
    if options.kind == SITE_OUT and options.splits is not None:
        raise InputError("--splits has no effect with --kind leave-one-site-out", remedy="leave it out")
    if options.kind != HOLDOUT and options.fraction is not None and not options.tune:
        what = f"--test-fraction has no effect with --kind {options.kind} without --tune"
        raise InputError(what, remedy="leave it out")
    least = 2 if options.kind == FOLDS else 1
    if options.splits is not None and not least <= options.splits <= MOST_SPLITS:
        raise InputError("--splits", expected=f"{least} to {MOST_SPLITS}", got=str(options.splits))
    if options.bootstrap and not LEAST_RESAMPLES <= options.bootstrap <= MOST_RESAMPLES:
        expected = f"{LEAST_RESAMPLES} to {MOST_RESAMPLES:,} resamples, or 0 for none"
        raise InputError("--bootstrap", expected=expected, got=str(options.bootstrap))
    if not 0 < options.test_fraction < 1:
        raise InputError("--test-fraction", expected="a number between 0 and 1", got=f"{options.test_fraction:g}")


def parse_baselines(text: str) -> tuple[str, ...]:
    """Return the baselines that ``all``, ``none`` or a comma-separated list names, in the order of `BASELINES`.

    Raises:
        InputError: a name is unknown.
    """
    if text in ("all", "none"):
        return BASELINES if text == "all" else ()
    found = [word.strip() for word in text.split(",") if word.strip()]
    for word in found:
        if word in ("all", "none"):
            raise InputError(f"--baselines {word}", expected="no other beside it", got=text)
        if word not in BASELINES:
            remedy = nearest(word, [*BASELINES, "all", "none"])
            raise InputError(f"no baseline {word!r}", where="--baselines", remedy=remedy)
    return tuple(name for name in BASELINES if name in found)
