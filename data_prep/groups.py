"""Groups of samples, such as those of a patient: their names, and their division into parts that share none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np

from data_prep.tables import cells
from hpcfed.errors import InputError, counted, nearest


def names_of(kept: Sequence[tuple[str, np.ndarray]], groups: Mapping[str, Any]) -> list[str]:
    """Return the names of the groups of all samples that are kept.

    Args:
        kept: clients, "" for the common test set, each with a mask of its samples, (n,) bool.
        groups: client → the groups of its n samples, texts or whole numbers.

    Raises:
        InputError: a client has no groups, or not one a sample; or a name is empty, or not UTF-8.
    """
    found: list[str] = []
    known = [name for name, _ in kept]
    if unknown := sorted(groups.keys() - set(known)):
        raise InputError(f"groups of {_place(unknown[0])}", remedy=nearest(unknown[0], known))
    for name, mask in kept:
        own = np.asarray(groups.get(name, ()))
        if own.shape != mask.shape or (len(own) and own.dtype.kind not in "USbiu"):
            expected = f"{len(mask):,} names or whole numbers, one a sample"
            got = f"{own.dtype} of shape {own.shape}" if name in groups else "none"
            raise InputError(f"groups of {_place(name)}", expected=expected, got=got)
        if own.dtype.kind == "S":
            texts = [cells.decoded(f"groups of {_place(name)}", text) for text in own.tolist()]
        else:
            texts = own.astype(str).tolist()
        if "" in texts:
            raise InputError(f"groups of {_place(name)}", expected="a name for each sample", got="an empty one")
        found += map(cells.composed, compress(texts, mask))
    return found


def _place(client: str) -> str:
    return f"client {client!r}" if client else "the test set"


def numbered(*parts: Sequence[str]) -> Iterator[np.ndarray]:
    """Yield the number of each group among those of all parts, in the order of their names, (n,) int64 each."""
    numbers = {name: number for number, name in enumerate(sorted(set().union(*parts)))}
    for part in parts:
        yield np.array([numbers[name] for name in part], np.int64)


def described(owner: np.ndarray | None, group: np.ndarray, tests: np.ndarray, names: Iterable[str]) -> Iterator[str]:
    """Yield lines on the groups of training samples: their number, those of several clients, and those of tests.

    Another line is on groups whose `names` look alike.
    """
    sizes = np.bincount(group)
    yield f"{counted(int(np.count_nonzero(sizes)), 'group')}, the largest of {counted(int(sizes.max()), 'row')}"
    if owner is not None:
        pairs = np.unique(np.stack([group, owner], axis=1), axis=0)
        if several := int((np.bincount(pairs[:, 0]) > 1).sum()):
            yield f"{_are(several)} of several clients; where each client numbers its own, make the names unique"
    if line := cells.twice("groups", names):
        yield f"{line}: write each in one way, or its rows may come to both sides of a test split"
    if both := len(np.intersect1d(group, tests)):
        yield f"{_are(both)} in training and in test rows"


def _are(number: int) -> str:
    return f"{counted(number, 'group')} {'is' if number == 1 else 'are'}"


def divide(
    group: np.ndarray, stratum: np.ndarray, shares: Sequence[float], rng: np.random.Generator, *, ordered: bool = False
) -> np.ndarray:
    """Return the part of each of n samples, (n,) int64: one part a group, and of each stratum nearly the part's share.

    Groups come in random order. Each goes to the part f for which Σ_f Σ_s n_fs² / (q_f N_s²) grows least; the sum is
    smallest where every part f has its share q_f of all N_s samples of each stratum s. Then parts that lack a stratum
    with enough groups receive its smallest group that can be spared.

    Args:
        group: (n,) int64, the group of each sample.
        stratum: (n,) int64, its stratum.
        shares: q, (F,), of sum 1.
        rng: of the order.
        ordered: whether large groups come first: parts are more alike, but two divisions are, too.
    """
    members = np.unique(group, return_inverse=True)[1]
    strata = np.unique(stratum, return_inverse=True)[1]
    counts = _counts(members, strata)
    order = rng.permutation(len(counts))
    if ordered:
        sizes = np.array([found.sum() for _, found in counts])
        order = order[np.argsort(-sizes[order], kind="stable")]
    weight, share = 1.0 / np.bincount(strata) ** 2.0, np.array(shares)
    held = np.zeros((len(share), len(weight)))
    part = np.empty(len(counts), np.int64)
    for one in order.tolist():
        where, found = counts[one]
        growth = ((2 * held[:, where] + found) * found * weight[where]).sum(axis=1) / share
        part[one] = growth.argmin()
        held[part[one], where] += found
    _complete(part, counts, len(share), order)
    return part[members]


def _counts(members: np.ndarray, strata: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the strata of each group, and how many of its samples are in each."""
    pairs, counts = np.unique(np.stack([members, strata], axis=1), axis=0, return_counts=True)
    ends = np.flatnonzero(np.diff(pairs[:, 0])) + 1
    return list(zip(np.split(pairs[:, 1], ends), np.split(counts, ends), strict=True))


def _complete(part: np.ndarray, counts: Sequence[tuple[np.ndarray, np.ndarray]], parts: int, order: np.ndarray) -> None:
    """Move groups to parts that lack a stratum, from parts that keep another group of each of its strata."""
    number = 1 + max(int(where.max()) for where, _ in counts)
    has = np.zeros((parts, number), np.int64)
    for one, (where, _) in enumerate(counts):
        has[part[one], where] += 1
    smallest = sorted(order.tolist(), key=lambda one: int(counts[one][1].sum()))
    for lacking, stratum in np.argwhere(has == 0).tolist():
        if has[:, stratum].sum() < parts or has[lacking, stratum]:
            continue
        for one in smallest:
            where = counts[one][0]
            if stratum in where and (has[part[one], where] > 1).all():
                has[part[one], where] -= 1
                has[lacking, where] += 1
                part[one] = lacking
                break
