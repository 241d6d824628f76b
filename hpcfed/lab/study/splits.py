"""Splits of sites' samples into training and test parts: repeated holdout, k folds, or one site left out at a time.

Holdouts and folds are drawn within strata, the samples of one site and label, from a random stream that depends on the
seed and the site alone. Samples of a group, such as a patient's, stay together: groups are drawn for all sites at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from data_prep.groups import divide
from data_prep.streams import stream
from hpcfed.errors import InputError, counted

HOLDOUT, FOLDS, SITE_OUT = KINDS = ("holdout", "k-fold", "leave-one-site-out")
MIN_STRATUM = 2
"""Fewest samples of a stratum for a holdout: one in each part."""
WITHOUT = "prepare the data without that site, such as with --min-samples"
UNMET = 0.1
"""Deviation of a site's number of test samples that gets no remark: this share of the smaller part, at least 1."""


@dataclass(frozen=True)
class TrainTestSplit:
    """One split of n samples.

    Attributes:
        tests: (n,) bool, the test samples; all samples that are neither these nor `unused` are for training.
        site: index of the site that is left out; None if every site has both parts.
        unused: (n,) bool, samples in neither part; None if every sample is in a part.
    """

    tests: np.ndarray
    site: int | None = None
    unused: np.ndarray | None = None

    @property
    def training(self) -> np.ndarray:
        """The training samples, (n,) bool."""
        return ~self.tests if self.unused is None else ~(self.tests | self.unused)

    @property
    def ratio(self) -> float:
        """Ratio of test to training samples, n_test / n_train."""
        return float(self.tests.sum() / self.training.sum())

    def trainers(self, owner: np.ndarray) -> list[int]:
        """Return the indices of the sites with training samples; `owner`, (n,), is the site of each sample."""
        return np.unique(owner[self.training]).tolist()


@dataclass(frozen=True)
class Splits:
    """The splits of a study, and remarks for the user, such as on strata that are too small."""

    each: tuple[TrainTestSplit, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Divisible:
    """The sites, labels and groups of n samples, by which they are split.

    Attributes:
        site: (n,) int64, the site of each sample.
        label: (n,) int64, the label of each sample; None if samples are not stratified by label.
        sites, labels: names, for the remarks.
        group: (n,) int64, the group of each sample; None without groups.
    """

    site: np.ndarray
    label: np.ndarray | None
    sites: Sequence[str]
    labels: Sequence[str] = ()
    group: np.ndarray | None = None

    def named(self, labels: Sequence[int]) -> str:
        """Return the names of labels, comma-separated; a label without a name is shown as its number."""
        return ", ".join(self.labels[one] if one < len(self.labels) else str(one) for one in labels)


def make_splits(kind: str, samples: Divisible, count: int, fraction: float, seed: int, purpose: str = "") -> Splits:
    """Split n samples `count` times.

    Args:
        kind: one of `KINDS`.
        samples: the samples' sites, labels and groups.
        count: number of holdouts or folds; ignored if sites are left out: there is one split per site.
        fraction: share of a site's samples in the test part of a holdout.
        seed: seed of the random choice.
        purpose: prefix of the random streams' names; splits for different purposes are independent.

    Raises:
        InputError: a site has too few samples or groups, or groups leave it without one part of a split; or sites are
            left out, and a group is at several sites.
    """
    site, sites, label, group = samples.site, samples.sites, samples.label, samples.group
    if kind == SITE_OUT:
        _refuse_shared(samples)
        return Splits(tuple(TrainTestSplit(site == k, k) for k in range(len(sites))))
    least = count if kind == FOLDS else MIN_STRATUM
    _refuse_small(kind, samples, count, least)
    if group is not None:
        stratum = site if label is None else site * (1 + int(label.max())) + label
        tests = _by_group(kind, group, stratum, count, fraction, seed, purpose)
        return Splits(tuple(map(TrainTestSplit, tests)), tuple(_remarks(tests, samples)))
    tests = np.zeros((count, len(site)), bool)
    remarks: list[str] = []
    for k, name in enumerate(sites):
        rows = np.flatnonzero(site == k)
        strata, small = _strata(np.zeros(len(rows), np.int64) if label is None else label[rows], least)
        if small:
            remarks.append(f"{name}: fewer than {least} samples of {samples.named(small)}: not stratified by it")
        if kind == FOLDS:
            tests[:, rows] = folds(strata, count, stream(seed, f"{purpose}folds of site {k}"))
        else:
            for number in range(count):
                tests[number, rows] = holdout(strata, fraction, stream(seed, f"{purpose}holdout {number} of site {k}"))
    if kind == HOLDOUT:
        remarks += _unmet(tests[0], site, fraction, sites)
    return Splits(tuple(TrainTestSplit(part) for part in tests), tuple(remarks))


def inner_split(split: TrainTestSplit, number: int, samples: Divisible, fraction: float, seed: int) -> TrainTestSplit:
    """Return a holdout of a split's training samples; all other samples are `unused`.

    `number` is the split's index, which selects the random stream; `fraction` and `seed` are as in `make_splits`.

    Raises:
        InputError: a site has too few training samples or groups.
    """
    rows = np.flatnonzero(split.training)
    present, own = np.unique(samples.site[rows], return_inverse=True)
    label, group = (None if each is None else each[rows] for each in (samples.label, samples.group))
    training = Divisible(own, label, [samples.sites[k] for k in present.tolist()], group=group)
    found = make_splits(HOLDOUT, training, 1, fraction, seed, f"tuning of split {number}: ")
    tests = np.zeros(len(samples.site), bool)
    tests[rows] = found.each[0].tests
    return TrainTestSplit(tests, unused=~split.training)


def _unmet(tests: np.ndarray, site: np.ndarray, fraction: float, sites: Sequence[str]) -> Iterator[str]:
    """Yield a line naming the sites where a holdout's test part is clearly larger or smaller than `fraction`."""
    found = []
    for k, name in enumerate(sites):
        own = tests[site == k]
        asked = round(fraction * len(own))
        if abs(int(own.sum()) - asked) > max(1, UNMET * min(asked, len(own) - asked)):
            found.append(f"{name} ({own.sum():,} of {len(own):,})")
    if found:
        why = "each label keeps a sample in both parts"
        yield f"--test-fraction {fraction:g} is not met, since {why}: tested are {', '.join(found)}"


def _by_group(
    kind: str, group: np.ndarray, stratum: np.ndarray, count: int, fraction: float, seed: int, purpose: str
) -> np.ndarray:
    """Return the test samples of each of J = `count` splits, (J, n) bool, for samples with groups.

    Groups stay whole, and strata are divided as evenly as that allows. `group` and `stratum` are (n,); all other
    arguments are those of `make_splits`.
    """
    if kind == FOLDS:
        part = divide(group, stratum, (1 / count,) * count, stream(seed, f"{purpose}folds of groups"), ordered=True)
        return np.asarray(part == np.arange(count)[:, None])
    shares = (fraction, 1 - fraction)
    streams = (stream(seed, f"{purpose}holdout {number} of groups") for number in range(count))
    return np.array([divide(group, stratum, shares, rng) == 0 for rng in streams])


def _refuse_small(kind: str, samples: Divisible, count: int, least: int) -> None:
    """Check that each site has at least `least` samples or, if they have groups, groups.

    Raises:
        InputError: some site has fewer.
    """
    site, group = samples.site, samples.group
    units = site if group is None else np.unique(np.stack([site, group], axis=1), axis=0)[:, 0]
    sizes = np.bincount(units, minlength=len(samples.sites))
    if sizes.min() < least:
        k = int(sizes.argmin())
        lacks, of = ("is too small", " samples") if group is None else ("has too few groups", "")
        what = f"{kind} of {counted(count, 'split')}: site {samples.sites[k]!r} {lacks}"
        remedy = "ask for fewer folds" if kind == FOLDS and sizes.min() >= MIN_STRATUM else WITHOUT
        raise InputError(what, expected=f"at least {least}{of}", got=str(sizes[k]), remedy=remedy)


def _refuse_shared(samples: Divisible) -> None:
    """Check that no group has samples of several sites: otherwise training and test parts would share it.

    Raises:
        InputError: some group has samples of several sites.
    """
    if samples.group is None:
        return
    pairs = np.unique(np.stack([samples.group, samples.site], axis=1), axis=0)
    again = np.flatnonzero(pairs[1:, 0] == pairs[:-1, 0])
    if len(again):
        several, first = len(np.unique(pairs[again, 0])), int(again[0])
        names = " and ".join(samples.sites[k] for k in pairs[first : first + 2, 1].tolist())
        remedy = "leave them out, or, where each site numbers its own, make the names unique in `prepare`"
        what = f"{SITE_OUT}: {several:,} groups are of several sites"
        raise InputError(what, got=f"one of {names}", remedy=remedy)


def _remarks(tests: np.ndarray, samples: Divisible) -> Iterator[str]:
    """Yield a line for each site with labels that are in only one part of some split; last, one on the share tested.

    Raises:
        InputError: some split has all samples of a site in one part.
    """
    shares = []
    for k, name in enumerate(samples.sites):
        of_site = samples.site == k
        own = tests[:, of_site]
        shares += own.mean(axis=1).tolist()
        if not (own.any(axis=1) & ~own.all(axis=1)).all():
            without = "a federation without it: `hpcfed prepare federation --min-samples` leaves small clients out"
            remedy = f"choose another --split-seed, or, for a site too small for any, {without}"
            raise InputError(f"site {name!r} is in one part of a split alone", remedy=remedy)
        label = np.zeros(own.shape[1], np.int64) if samples.label is None else samples.label[of_site]
        found = [(int(one), own[:, label == one]) for one in np.unique(label)]
        lacking = [one for one, part in found if not (part.any(axis=1) & ~part.all(axis=1)).all()]
        if lacking:
            yield f"{name}: {samples.named(lacking)} in one part alone of some splits, for want of groups"
    low, high = (f"{100 * share:.0f}" for share in (min(shares), max(shares)))
    tested = low if low == high else f"{low} to {high}"
    yield f"no group is in both parts; {tested} % of a site's samples are tested on"


def _strata(label: np.ndarray, least: int) -> tuple[list[np.ndarray], list[int]]:
    """Return the sample indices of each stratum, and the labels with fewer than `least` samples.

    Each label is a stratum, except that labels with too few samples form one together; if that has too few samples as
    well, it joins the largest stratum.
    """
    found, counts = np.unique(label, return_counts=True)
    small = [int(value) for value in found[counts < least]]
    strata = [np.flatnonzero(label == value) for value in found[counts >= least]]
    rest = np.flatnonzero(np.isin(label, small))
    if len(rest) >= least or (len(rest) and not strata):
        strata.append(rest)
    elif len(rest):
        largest = max(range(len(strata)), key=lambda k: len(strata[k]))
        strata[largest] = np.sort(np.concatenate([strata[largest], rest]))
    return strata, small


def folds(strata: Sequence[np.ndarray], count: int, rng: np.random.Generator) -> np.ndarray:
    """Return which of a site's n samples are in each fold, (count, n) bool; each sample is in one fold.

    `strata` has the indices of each stratum's samples. Samples are dealt to the folds in turn, stratum after stratum,
    in random order within a stratum; each stratum continues at the fold after the last one served. So sizes of folds
    differ by at most 1, in total and within each stratum.
    """
    order = np.concatenate([rng.permutation(rows) for rows in strata])
    fold = np.empty(len(order), np.int64)
    fold[order] = (np.arange(len(order)) + rng.integers(count)) % count
    return fold == np.arange(count)[:, None]


def holdout(strata: Sequence[np.ndarray], fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Draw a site's test samples, (n,) bool: up to rounding, `fraction` of each stratum and of the site.

    `strata` has the indices of each stratum's samples. A stratum of two samples or more keeps at least one sample in
    each part, which may move the site's share away from `fraction`.
    """
    sizes = np.array([len(rows) for rows in strata])
    tests = np.zeros(int(sizes.sum()), bool)
    for rows, size in zip(strata, _quotas(sizes, fraction).tolist(), strict=True):
        tests[rng.permutation(rows)[:size]] = True
    return tests


def _quotas(sizes: np.ndarray, fraction: float) -> np.ndarray:
    """Return the number of test samples in each stratum, by the method of largest remainders.

    A stratum of two samples or more has at least one sample in each part.
    """
    exact = fraction * sizes
    quotas = np.floor(exact).astype(np.int64)
    left = round(float(exact.sum())) - int(quotas.sum())
    quotas[np.argsort(quotas - exact, kind="stable")[: max(left, 0)]] += 1
    return np.clip(quotas, np.minimum(sizes - 1, 1), np.maximum(sizes - 1, 0))
