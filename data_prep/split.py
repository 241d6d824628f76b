"""Assignment of samples to clients, by the source's split or a partition scheme, and per-client test sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data_prep import partition
from data_prep.dataset import Dataset
from data_prep.groups import divide
from data_prep.partition._sizes import SIZES, enough
from data_prep.streams import stream
from hpcfed.errors import InputError, counted, first_of, nearest, shown

NATURAL = "natural"
NUM_CLIENTS = 100
WITHOUT_LABELS = ("iid", "quantity")
"""Schemes that do not look at labels."""
REAL_OPTIONS = ("alpha", "sigma")
WHOLE_OPTIONS = ("shards", "per_client", "min_samples")
NATURAL_OPTIONS = ("min_samples", "crop", "test_crop", "deal", "shuffle")
NOBODY = -1
MAX_LISTED = 10


@dataclass(frozen=True)
class Split:
    """Assignment of a `Dataset`'s samples to N clients.

    Attributes:
        owner: (n,) int64, the client of each sample, 0 … N-1; `NOBODY` for a sample that is left out.
        num_clients: N.
        partition: provenance, stored as JSON: scheme, parameters, seed.
        clients: the N clients' names; None for ``client-0`` and so on.
        held: (n,) bool, samples held out for per-client test sets, which replace the source's test set; None if all are
            for training.
        test_owner: (num_test,) int64, the client of each of the source's test samples; None for a common test set.
    """

    owner: np.ndarray
    num_clients: int
    partition: dict[str, Any]
    clients: Sequence[str] | None = None
    held: np.ndarray | None = None
    test_owner: np.ndarray | None = None

    @property
    def training(self) -> np.ndarray:
        """Mask of the samples that clients train on, (n,) bool."""
        owned = self.owner != NOBODY
        return owned if self.held is None else owned & ~self.held


def split(
    dataset: Dataset, scheme: str | None, num_clients: int | None, seed: int, options: Mapping[str, Any]
) -> Split:
    """Assign the samples of a data set to clients.

    Args:
        dataset: the samples.
        scheme: a name of `partition.SCHEMES`, or ``natural``; None for natural if the source comes split, else iid.
        num_clients: N; None for 100, or the source's own number.
        seed: of every random choice.
        options: the user's options: the scheme's; ``min_samples``, which every scheme takes; and ``test_fraction``, the
            share of its samples that each client holds out for its own test set.

    Raises:
        InputError: an unknown scheme, an option that would have no effect, or numbers that cannot be met.
    """
    check_scheme(scheme)
    left = dict(options)
    test_fraction = left.pop("test_fraction", None)
    if scheme is None:
        scheme = NATURAL if dataset.owner is not None else "iid"
    scheme = scheme.lower()
    if scheme == NATURAL:
        done = _natural(dataset, num_clients, seed, left)
    else:
        done = _by_scheme(dataset, scheme, num_clients or NUM_CLIENTS, seed, left)
    return done if test_fraction is None else _hold_out(done, test_fraction, seed, dataset.group)


def check_scheme(scheme: str | None) -> None:
    """Refuse an unknown partition scheme; None and ``natural`` are known.

    Raises:
        InputError: naming the nearest.
    """
    known = [*partition.SCHEMES, NATURAL]
    if scheme is not None and scheme.lower() not in known:
        alike = [repr(name) for name in known if name.startswith(f"{scheme.lower()}-")]
        remedy = f"did you mean {' or '.join(alike)}?" if alike else nearest(scheme, known)
        raise InputError(f"unknown partition {scheme.lower()!r}", remedy=remedy)


def refuse(options: Mapping[str, Any], what: str) -> None:
    """Refuse options that would have no effect, since the user expects one.

    Raises:
        InputError: naming them.
    """
    if options:
        names = ", ".join(f"--{key.replace('_', '-')}" for key in options)
        raise InputError(f"{names} has no effect with {what}", remedy="leave it out")


def _natural(dataset: Dataset, num_clients: int | None, seed: int, left: dict[str, Any]) -> Split:
    """Keep the source's clients, all or `num_clients` at random, with all their samples or a contiguous crop.

    ``min_samples``: clients with fewer training samples are left out. ``crop``: number of consecutive training samples
    kept of each client, from a random start; clients with fewer are left out. ``test_crop``: the same for test samples.
    ``deal``: number of clients of equal sizes to which the kept samples are then dealt at random. ``shuffle``: before
    all this the samples of all clients are exchanged at random, as many to each as it had.

    Reference: Acar et al., FedDyn, appendix A.2; utils_dataset.py of its code (`ShakespeareObjectCrop`, on LEAF's IID
    split, and `ShakespeareObjectCrop_noniid`).
    """
    if dataset.owner is None:
        raise InputError(f"{dataset.name} does not come split", remedy="choose another --partition")
    rule = {name: left.pop(name) for name in NATURAL_OPTIONS if left.get(name)}
    left.pop("min_samples", None)
    refuse(left, f"{dataset.name}, which comes split")
    if "test_crop" in rule and dataset.test_owner is None:
        raise InputError("--test-crop", expected="clients with test samples of their own", got="none")
    sizes, tests, fits = _fitting(dataset, rule)
    total, fitting = len(sizes), np.flatnonzero(fits)
    if not len(fitting):
        least = max(rule.get("min_samples", 0), rule.get("crop", 0))
        raise InputError("no client has that many samples", expected=f"at least {least}", got=f"at most {sizes.max()}")
    if num_clients is not None and num_clients > len(fitting):
        rest = " that have so many samples" if rule.keys() & {"min_samples", "crop", "test_crop"} else ""
        expected = f"at most the {counted(len(fitting), 'client')} of {dataset.name}{rest}"
        raise InputError("--clients", expected=expected, got=str(num_clients))
    chosen = fitting
    if num_clients is not None and num_clients < len(fitting):
        chosen = np.sort(stream(seed, "natural clients").choice(fitting, num_clients, replace=False))
    number = np.full(total, NOBODY)
    number[chosen] = np.arange(len(chosen))
    owner, test_owner = dataset.owner, dataset.test_owner
    if "shuffle" in rule:
        owner = _shuffled(owner, stream(seed, "shuffle"), in_source_order(dataset.rows))
        test_owner = None if test_owner is None else _shuffled(test_owner, stream(seed, "shuffle tests"))
    owner = _cropped(owner, number, sizes, rule.get("crop"), stream(seed, "crop"), dataset.rows)
    if test_owner is not None:
        test_owner = _cropped(test_owner, number, tests, rule.get("test_crop"), stream(seed, "test crop"))
    if "deal" in rule:
        for purpose, owners in (("deal", owner), ("deal tests", test_owner)):
            if owners is not None:
                kept = np.flatnonzero(owners != NOBODY)
                enough(len(kept), rule["deal"], 1)
                owners[kept] = stream(seed, purpose).permutation(len(kept)) % rule["deal"]
    at_random = len(chosen) < len(fitting) or rule.keys() & {"crop", "test_crop", "deal", "shuffle"}
    partition = {"scheme": NATURAL, "clients": len(chosen), **rule, **({"seed": seed} if at_random else {})}
    if "deal" in rule:
        return Split(owner, rule["deal"], partition, test_owner=test_owner)
    names = None if "shuffle" in rule else dataset.clients
    named = None if names is None else [names[k] for k in chosen.tolist()]
    return Split(owner, len(chosen), partition, named, test_owner=test_owner)


def _fitting(dataset: Dataset, rule: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the source's clients' numbers of training and of test samples, and which have as many as asked, (N,)."""
    assert dataset.owner is not None
    total = len(dataset.clients or ()) or int(dataset.owner.max(initial=-1)) + 1
    sizes = np.bincount(dataset.owner, minlength=total)
    tests = np.bincount(dataset.test_owner, minlength=total) if dataset.test_owner is not None else sizes
    least = max(rule.get("min_samples", 0), rule.get("crop", 0))
    return sizes, tests, (sizes >= least) & (tests >= rule.get("test_crop", 0))


def left_out(dataset: Dataset, done: Split) -> str:
    """Return the names and sizes of the source's clients that have too few samples; "" for none."""
    if dataset.owner is None or done.partition["scheme"] != NATURAL:
        return ""
    sizes, _, fits = _fitting(dataset, done.partition)
    found = np.flatnonzero(~fits).tolist()
    names = dataset.clients or [f"client {k}" for k in range(len(sizes))]
    counts = [counted(int(sizes[k]), "sample") if k == found[0] else f"{sizes[k]:,}" for k in found[:MAX_LISTED]]
    words = [f"{names[k]} ({count})" for k, count in zip(found, counts, strict=False)]
    return first_of(words, MAX_LISTED, len(found))


def _shuffled(owner: np.ndarray, rng: np.random.Generator, order: np.ndarray | None = None) -> np.ndarray:
    """Return clients of the same sizes for the samples, (n,), at random; `order` is that in which they are counted."""
    exchanged = rng.permutation(np.sort(owner))
    if order is None:
        return exchanged
    found = np.empty_like(exchanged)
    found[order] = exchanged
    return found


def _cropped(
    owner: np.ndarray,
    number: np.ndarray,
    sizes: np.ndarray,
    crop: int | None,
    rng: np.random.Generator,
    rows: np.ndarray | None = None,
) -> np.ndarray:
    """Return the new number of each sample's client, (n,); `NOBODY` outside the client's `crop` consecutive samples."""
    kept: np.ndarray = number[owner]
    if crop is None:
        return kept
    starts = (rng.random(len(sizes)) * np.maximum(sizes - crop + 1, 1)).astype(np.int64)
    place = np.arange(len(owner)) if rows is None else rows
    order = np.lexsort((*place.reshape(len(owner), -1).T[::-1], owner))
    position = np.empty(len(owner), np.int64)
    position[order] = np.arange(len(owner)) - (np.cumsum(sizes) - sizes)[owner[order]]
    kept[(position < starts[owner]) | (position >= starts[owner] + crop)] = NOBODY
    return kept


def _by_scheme(dataset: Dataset, scheme: str, num_clients: int, seed: int, left: dict[str, Any]) -> Split:
    if scheme not in WITHOUT_LABELS and (dataset.num_classes is None or dataset.y.ndim > 1):
        raise InputError(f"{scheme} needs classes, and {dataset.name} has none", remedy="use --partition iid")
    order = in_source_order(dataset.rows)
    labels = np.asarray(dataset.y if order is None else dataset.y[order])
    owner, settings = assigned(labels, scheme, num_clients, seed, left)
    if order is not None:
        in_file = np.empty_like(owner)
        in_file[order] = owner
        owner = in_file
    return Split(owner, num_clients, {"scheme": scheme, "clients": num_clients, **settings, "seed": seed})


def assigned(
    labels: np.ndarray, scheme: str, num_clients: int, seed: int, options: Mapping[str, Any]
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the client of each sample, (n,) int64, by a scheme, and all that decided it but the seed.

    Args:
        labels: (n,) of 0 … K-1.
        options: of the scheme, and ``min_samples``.

    Raises:
        InputError: an option that would have no effect, or numbers that cannot be met.
    """
    left, assign = {key: _checked(key, value) for key, value in options.items()}, partition.SCHEMES[scheme]
    settings = partition.options(assign)
    least = None if "min_samples" in settings else left.pop("min_samples", None)
    refuse({key: value for key, value in left.items() if key not in settings}, f"--partition {scheme}")
    settings.update(left)
    if settings.get("sizes") == "equal":
        refuse({key: value for key, value in left.items() if key == "sigma"}, "--sizes equal")
        settings = {key: value for key, value in settings.items() if key in left or key not in ("sigma", "min_samples")}
    if settings.get("capped") is False:  # not a key of earlier files
        del settings["capped"]
    owner = assign(labels, num_clients, stream(seed, f"partition: {scheme}"), **settings)
    if least is not None:
        _check_sizes(owner, num_clients, least)
        settings["min_samples"] = least
    return owner, settings


def _checked(name: str, value: Any) -> Any:
    """Return a scheme's option as Python's own number; a name that no scheme has is refused by others.

    Raises:
        InputError: it is of another type.
    """
    least, is_bool = (0 if name == "min_samples" else 1), isinstance(value, bool | np.bool_)
    if name in REAL_OPTIONS and (is_bool or not isinstance(value, int | float | np.integer | np.floating)):
        expected = "a number"
    elif name in WHOLE_OPTIONS and (is_bool or not isinstance(value, int | np.integer) or value < least):
        expected = f"a whole number from {least}"
    elif name == "capped" and not is_bool:
        expected = "True or False"
    elif name == "sizes" and not isinstance(value, str):
        expected = " or ".join(SIZES)
    else:
        return value.item() if isinstance(value, np.generic) else value
    raise InputError(f"--{name.replace('_', '-')}", expected=expected, got=shown(value))


def in_source_order(rows: np.ndarray | None) -> np.ndarray | None:
    """Return the permutation that sorts samples by their rows in the source; None if they are sorted."""
    if rows is None or (rows.ndim == 1 and (rows[1:] >= rows[:-1]).all()):
        return None
    return np.lexsort(rows.T[::-1]) if rows.ndim > 1 else np.argsort(rows, kind="stable")


def _check_sizes(owner: np.ndarray, num_clients: int, least: int) -> None:
    sizes = np.bincount(owner, minlength=num_clients)
    if sizes.min() < least:
        expected = f"at least {counted(least, 'sample')} a client"
        raise InputError("--min-samples", expected=expected, got=str(sizes.min()), remedy="ask for fewer clients")


def _hold_out(done: Split, fraction: float, seed: int, group: np.ndarray | None) -> Split:
    """Hold out ⌊fraction · n_k⌋ samples of each client k, drawn at random, for its own test set.

    Groups are held out as a whole, or not at all: nearly as many samples.
    """
    if not 0 < fraction < 1:
        raise InputError("--test-fraction", expected="a number between 0 and 1", got=str(fraction))
    held = _hold_out_samples(done, fraction, seed) if group is None else _hold_out_groups(done, fraction, seed, group)
    record = {**done.partition, "test_fraction": fraction}
    if done.partition["scheme"] == NATURAL:
        record["seed"] = seed
    return replace(done, partition=record, held=held, test_owner=None)


def _hold_out_groups(done: Split, fraction: float, seed: int, group: np.ndarray) -> np.ndarray:
    """Return the mask of the samples of groups that are held out, (n,)."""
    held, owned = np.zeros(len(done.owner), bool), done.owner != NOBODY
    rng = stream(seed, "test sets of clients")
    held[owned] = divide(group[owned], done.owner[owned], (fraction, 1 - fraction), rng) == 0
    had, left = (np.bincount(done.owner[mask], minlength=done.num_clients) for mask in (owned, owned & ~held))
    if (bare := (had > 0) & (left == 0)).any():
        k = int(bare.argmax())
        name = str(k) if done.clients is None else repr(done.clients[k])
        what = f"client {name}: all its groups would be held out"
        raise InputError(what, where="--test-fraction", remedy="hold out less than half, or leave the client out")
    return held


def _hold_out_samples(done: Split, fraction: float, seed: int) -> np.ndarray:
    """Return the mask of ⌊fraction · n_k⌋ samples of each client k, (n,)."""
    keys = stream(seed, "test sets of clients").random(len(done.owner))
    order = np.lexsort((keys, done.owner))
    sizes = np.bincount(done.owner - NOBODY, minlength=done.num_clients - NOBODY)
    starts = np.cumsum(sizes) - sizes
    owner_of = done.owner[order] - NOBODY
    held = np.empty(len(order), bool)
    held[order] = np.arange(len(order)) - starts[owner_of] < np.floor(fraction * sizes)[owner_of]
    return held & (done.owner != NOBODY)
