"""The options of a study, as the command takes them."""

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
    """The command's options.

    Attributes:
        methods: see `parse_methods`.
        kind: of the splits.
        splits: number of holdouts or folds; None for 5, and for as many as there are sites where one is left out.
        fraction: of a site's samples that a holdout tests on; None for `TEST_FRACTION`.
        split_seed: of the splits.
        seeds: of the runs; empty for the recipe's.
        baselines: names with commas between, ``all`` or ``none``.
        standardize: ``client``, ``pooled`` or ``none``; None for the file's own way.
        rounds: None for the recipe's.
        tune: grids, see `hpcfed.lab.study.tuning`.
        bootstrap: resamples of patients, 0 for none.
        output: the study's folder; None for the recipe's output with ``-study`` appended.
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
        """Share of a site's samples that a holdout tests on, the inner one of a study that tunes too."""
        return TEST_FRACTION if self.fraction is None else self.fraction


def check_options(options: StudyOptions) -> None:
    """Check the options on splits.

    Raises:
        InputError: a number is out of range.
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
    """Return the baselines of ``all``, ``none`` or a list with commas, in their usual order.

    Raises:
        InputError: an unknown one.
    """
    if text in ("all", "none"):
        return BASELINES if text == "all" else ()
    found = [word.strip() for word in text.split(",") if word.strip()]
    for word in found:
        if word not in BASELINES:
            raise InputError(f"no baseline {word!r}", where="--baselines", remedy=nearest(word, [*BASELINES, "none"]))
    return tuple(name for name in BASELINES if name in found)
