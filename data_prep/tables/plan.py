"""Plan for the conversion of tables to samples, made by the first pass over them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.samples import OF_EVENTS
from data_prep.sources.own_images import Headers
from data_prep.tables import cells, labels, missing
from data_prep.tables.columns import ColumnOptions, ColumnRoles, is_identifier, roles
from data_prep.tables.images import headers
from data_prep.tables.read import blocks, separator
from data_prep.tables.survey import Feature, Survey, features, survey
from hpcfed.errors import InputError, counted, first_of

Files = Sequence[Path]
SEPARATOR_NAMES = {";": "semicolons", "\t": "tabs", "|": "bars"}
MAX_LISTED = 8


@dataclass(frozen=True)
class TablePlan:
    """Everything that the conversion of rows to samples needs.

    Attributes:
        clients: texts of the cells that name clients; empty if files name them.
        groups: text of a cell that names a group → its number; empty without groups.
        missing: column → number of missing cells.
        headers: what the headers of images say; of none without.
        dropped: client or test set → rows dropped so far.
        labelled: clients that have a row so far that lacks neither label, client nor group.
    """

    options: ColumnOptions
    roles: ColumnRoles
    found: Survey
    features: list[Feature]
    classes: labels.Classes | None
    clients: set[str]
    groups: dict[str, int]
    missing: dict[str, int]
    headers: Headers
    dropped: Counter[str] = field(default_factory=Counter)
    labelled: set[str] = field(default_factory=set)

    @property
    def image(self) -> bool:
        """Whether x is a column of images."""
        return self.found.facts[self.features[0].column].image

    @property
    def names(self) -> list[str]:
        """Names of the p features of x."""
        return [f"{f.column}={level}" if f.levels else f.column for f in self.features for level in f.levels or ("",)]

    @property
    def indicators(self) -> tuple[int, ...]:
        """Indices of the features that are 0 or 1."""
        hot = [bool(feature.levels) for feature in self.features for _ in feature.levels or ("",)]
        return tuple(np.flatnonzero(hot).tolist())

    @property
    def categories(self) -> tuple[tuple[int, int], ...]:
        """First and one past the last feature of each one-hot column."""
        ends = np.cumsum([len(feature.levels) or 1 for feature in self.features]).tolist()
        pairs = zip(self.features, ends, strict=True)
        return tuple((end - len(feature.levels), end) for feature, end in pairs if feature.levels)

    def described(self) -> dict[str, Any]:
        """Return the columns' metadata for the federation file."""
        said: dict[str, Any] = {"target": ", ".join(self.roles.targets)}
        if self.classes is not None and self.classes.names is not None:
            said["classes"] = self.classes.names
        levels = {feature.column: list(feature.levels) for feature in self.features if feature.levels}
        if levels:
            said["categories"] = levels
        if self.options.group is not None:
            said["group"] = self.options.group
        if self.options.missing_codes:
            said["missing_codes"] = list(self.options.missing_codes)
        if self.missing:
            said["missing"] = f"{self.options.missing}: {missing.listed(self.missing)}"
        return said

    def remarks(self, paths: Files, clients: Iterable[str]) -> Iterator[str]:
        """Yield lines on how the tables of these clients were understood."""
        if self.classes is not None:
            yield labels.described(self.roles.targets[0], self.classes)
            yield from self.classes.remarks
        else:
            yield f"target {', '.join(map(repr, self.roles.targets))}: {self.options.task}"
        if self.image:
            unused = [name for name in self.roles.features if name != self.features[0].column]
            also = f"; not used: {', '.join(unused)}" if unused else ""
            yield f"images of column {self.features[0].column!r}{also}"
            yield from self.headers.remarks()
        for feature in self.features:
            if feature.levels:
                yield f"one-hot {feature.column!r}: {first_of(feature.levels, MAX_LISTED)}"
                if line := cells.twice("levels", feature.levels, f" of {feature.column!r}"):
                    yield line
                chosen = feature.column in self.options.categorical
                if not chosen and all(cells.QUANTITY.fullmatch(level) for level in feature.levels):
                    example = f"words that look like numbers, such as {feature.levels[0]!r}"
                    yield f"{feature.column!r} has {example}: if they are, write them as 1200 or 1.5"
            elif (facts := self.found.facts[feature.column]).is_coarse:
                blurred = f"{feature.column!r} is rounded to float32 by up to {facts.rounding:.3g}"
                remedy = "subtract an offset in the tables, or leave it out by --exclude"
                yield f"{blurred}, its numbers differ by {facts.high - facts.low:.3g}: {remedy}"
        yield from self._codes()
        if self.roles.unused:
            yield f"left out: {', '.join(self.roles.unused)}, in which pandas stores the numbers of rows"
        if line := cells.twice("clients", clients):
            yield line
        if said := self._identifiers():
            yield said
        marks = {mark: path for path in paths if path.suffix.lower() != ".parquet" for mark in separator(path)}
        for mark in sorted(marks.keys() - {","}):
            yield f"cells are separated by {SEPARATOR_NAMES[mark]}, as in {marks[mark].name}"
        if self.found.comma:
            yield f"a comma is the decimal point, as in {self.found.comma}"
        if line := self._fractions():
            yield line
        if self.found.swallowed:
            yield f"{self.found.swallowed} holds line breaks and separators, maybe of whole rows: an open quote?"
        if self.missing:
            fills = self.options.missing in (missing.MEAN, missing.MEDIAN)
            fills &= any(feature.column in self.missing and not feature.levels for feature in self.features)
            filled = f"; numbers are filled by the {self.options.missing} of training rows" if fills else ""
            yield f"{missing.described(self.found, self.missing)}{filled}"

    def _codes(self) -> Iterator[str]:
        """Yield a line on features in which a negative number among others may stand for missing cells."""
        facts = {feature.column: self.found.facts[feature.column] for feature in self.features if not feature.levels}
        some = {name: one.coded for name, one in facts.items() if one.coded and 0 <= one.low_else < math.inf}
        if some:
            codes = sorted({code for coded in some.values() for code in coded}, reverse=True)
            counts = missing.listed({name: coded.total() for name, coded in some.items()})
            numbers, option = " or ".join(map(str, codes)), ",".join(map(str, codes))
            what = f"{numbers} among numbers from 0: {counts}"
            yield f"{what}; if these cells are missing, say so by --missing-codes={option}"

    def _fractions(self) -> str:
        """Return a line on features that may be thousands, read as fractions; "" for none."""
        cells_of = {
            feature.column: [cell for cell in self.found.facts[feature.column].thousands.values() if cell]
            for feature in self.features
            if not feature.levels
        }
        named = first_of([f"{name!r} {found[0]}" for name, found in cells_of.items() if found], MAX_LISTED)
        return f"read as fractions of three digits: {named}; write thousands without a point or comma" if named else ""

    def _identifiers(self) -> str:
        """Return a line on features whose names are of identifiers, such as a patient's number; "" for none."""
        used = [feature for feature in self.features if feature.column not in self.options.categorical]
        ids = [feature for feature in used if is_identifier(feature.column)]
        if self.image or not ids:
            return ""
        names = first_of([feature.column for feature in ids], MAX_LISTED)
        said = f"used as features, though their names are of identifiers: {names}; leave them out by --exclude"
        if self.options.group is not None:
            return said
        said += ", or the patient's by --group"
        if any(feature.levels or self.found.facts[feature.column].whole for feature in ids):
            said += ", without which rows of one patient may come to both sides of a test split"
        return said

    def dropped_rows(self) -> Iterator[str]:
        """Yield lines on how many rows each client lost."""
        lost = {name: count for name, count in self.dropped.items() if count}
        if lost:
            named = "a label or a client" if self.options.group is None else "a label, a client or a group"
            why = "" if self.options.missing == missing.DROP else f" without {named}"
            yield f"dropped {counted(sum(lost.values()), 'row')}{why}: {missing.listed(lost)}"


def plan(paths: Files, options: ColumnOptions, tests: Files = ()) -> TablePlan:
    """Read all tables once, those of test sets (`tests`) included, and return the plan for their conversion.

    Raises:
        InputError: files that are not tables, or do not fit each other or the options.
    """
    columns = roles(paths, options)
    found = survey(paths, columns, options, frozenset(tests))
    where = found.first
    if where is None:
        raise InputError("no table has a row", where=str(paths[0].parent))
    listed = features(found, columns, options, where)
    absent = missing.counts(found, columns, [feature.column for feature in listed])
    missing.refuse(found, absent, options)
    classes = None
    if options.task == "classification":
        classes = labels.classes(where, columns.targets[0], found.facts[columns.targets[0]])
        classes = labels.with_positive(classes, options.positive)
    else:
        for name in columns.targets:
            _check_numbers(name, found, where, _expected(columns.targets.index(name), options.task))
    clients = set() if options.client is None else _names("--client", options.client, found, where)
    groups = [] if options.group is None else sorted(_names("--group", options.group, found, where))
    numbers = {name: number for number, name in enumerate(groups)}
    image = found.facts[listed[0].column].image
    images = headers(
        (block for path in paths for block in blocks(path, options.missing_codes)) if image else (), listed[0].column
    )
    return TablePlan(options, columns, found, listed, classes, clients, numbers, absent, images)


def _names(option: str, name: str, found: Survey, where: Path) -> set[str]:
    facts = found.facts[name]
    if facts.strange or facts.image or not facts.levels:
        got = facts.strange or ("images" if facts.image else "none")
        raise InputError(f"{option}: column {name!r}", where=facts.strange_in or str(where), expected="names", got=got)
    return set(facts.levels)


def _expected(place: int, task: str) -> str:
    """Return what cells of a target hold; `place` is the target's among several."""
    if task == "survival" and place == 0:
        return OF_EVENTS
    return "0 or 1" if task == "multi-label" else "finite numbers"


def _check_numbers(name: str, found: Survey, where: Path, expected: str) -> None:
    facts = found.facts[name]
    if facts.word or facts.strange or facts.image or facts.infinite or facts.odd_truth:
        elsewhere = facts.infinite or facts.strange_in or str(where)
        beyond = "a number beyond float32" if facts.infinite else "another value"
        place, text = facts.word or facts.odd_truth or (elsewhere, facts.strange or beyond)
        raise InputError(f"target {name!r}", where=place, expected=expected, got=text[:40])
