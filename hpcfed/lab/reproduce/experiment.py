"""The schema of a paper's experiment, a YAML file in ``experiments/<paper>/``.

An experiment is cases (data and settings) × methods × seeds. The recipe of a run is the experiment's, overridden first
by the case's keys, then by the method's, then by the case's keys for that method, and at small scale by the small
variant's. A file without methods (``measure.kind: classes``) only examines data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, PrivateAttr, Tag, model_validator

from hpcfed.config.hints import spelled_out
from hpcfed.config.limits import Count, Section
from hpcfed.config.load import validated
from hpcfed.config.metrics import Metric, a_metric, listed
from hpcfed.config.recipe import seed_for_all
from hpcfed.errors import InputError

OWN_PAPER = "own"
"""Value of `Experiment.paper` in a user's own file."""
REPLACED_SECTIONS = ("model", "algorithm")
"""Sections of a recipe that a new name or factory replaces as a whole, since their keys belong to it."""
NO_NUMBERS: dict[str, Any] = {"paper": {}, "paper_beyond": {}}
AGAINST = " against "
"""Separates a figure's columns, ``y against x``; x: rounds (default), a cost, or another column, which draws a path."""
STEPS_OF_AVERAGE = "average_client"
"""Value of ``local.steps``: the number of steps in ``local.epochs`` epochs on a client of average size."""
Content = dict[str, Any]
Number = int | float | str
"""A number from a paper; text for a bound, such as ``1000+``."""
MISPLACED_KEYS = {
    "data": "the data of a case are in cases.NAME.data",
    "name": "a run is named by its case and method",
    "output": "runs are in the experiment's folder, inside --output",
    "seeds": "their number is the experiment's 'seeds'",
}
"""Recipe key that the experiment sets itself → where it does, for the error message."""


def part_of_a_recipe(content: Content) -> Content:
    """Return recipe keys of an experiment's file unchanged; raise ValueError for one of `MISPLACED_KEYS`."""
    for key, where in MISPLACED_KEYS.items():
        if key in content:
            raise ValueError(f"no {key!r} ({where})")
    return content


RecipePart = Annotated[Content, AfterValidator(part_of_a_recipe)]


class Data(Section):
    """The data of a case, as arguments of ``hpcfed prepare``.

    Attributes:
        source: a name of `data_prep.catalogue.SOURCES`; "" if `file` is set.
        file: a user's federation file, relative to the experiment's folder, used as it is; "" for prepared data.
        raw: the source's subfolder in the folder of all raw data, or ``subfolder/file`` if the source reads one file of
            it; "" for a source without files.
        partition, clients: the partition scheme and the number of clients, as in the command.
        options: options of the source and of the partition scheme, name → value.
        seed: seed of the data; None: the source's default; ``run``: the run's seed, so that each seed has its own data.
        test: ``own``: the source's test set; ``training``: all training samples; d numbers w*: a test set on which a
            linear model w has loss ‖w − w*‖²/2d; ``solution``: such a test set, w* being the least-squares solution of
            least norm on all training samples.
        noise: standard deviation of the last client's feature noise; that of client k of N is k / (N − 1) of it.
        start: initial parameters of a linear model: ``0``: all zero; d numbers: the weights; None: random.
    """

    source: str = ""
    file: str = ""
    raw: str = ""
    partition: str | None = None
    clients: Count | None = None
    options: Content = Field(default_factory=dict)
    seed: int | Literal["run"] | None = None
    noise: float = Field(0.0, ge=0)
    test: Literal["own", "training", "solution"] | list[float] = "own"
    start: Literal[0] | list[float] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Data:
        if bool(self.source) == bool(self.file):
            raise ValueError("either source, a data set to prepare, or file, a federation file")
        more = sorted(self.model_dump(exclude_defaults=True).keys() - {"file"}) if self.file else []
        if more:
            raise ValueError(f"with file nothing else, got {', '.join(more)}, too")
        return self


class Goal(Section):
    """A target per seed: the measured column's best value in `round` over the runs of method `of` with that seed."""

    of: str
    round: Count


def _kind_of_target(value: Any) -> str:
    return "goal" if isinstance(value, Mapping | Goal) else "number"


Target = Annotated[
    Annotated[float, Tag("number")] | Annotated[Goal, Tag("goal")],
    Discriminator(_kind_of_target),
]


class Case(Section):
    """A case of the experiment, such as one data set or partition: a block of rows in the table, and a figure.

    Attributes:
        title: name in the paper's words.
        data: see `Data`.
        recipe: keys that override the experiment's recipe.
        methods: method → its recipe keys in this case alone.
        grids: method → grids that replace the method's `grids`.
        only: names of the methods that run in this case; default: all.
        targets: values of the measured column to be reached.
        paper: method → the paper's numbers. What they are depends on `Measure.kind`: ``rounds``: one per target;
            ``final``, ``best``: one value; ``tuned``: base-10 logarithms of the tuned values; ``sites``: one
            text, ``mean ± deviation``, per test set; ``published``: mean and deviation, in percent.
        paper_beyond: method → the paper's `Measure.beyond`; for a fraction, in percentage points.
    """

    title: str
    data: Data
    recipe: RecipePart = Field(default_factory=dict)
    methods: dict[str, RecipePart] = Field(default_factory=dict)
    grids: dict[str, dict[str, str]] = Field(default_factory=dict)
    only: list[str] = Field(default_factory=list)
    targets: list[Target] = Field(default_factory=list)
    paper: dict[str, list[Number | None]] = Field(default_factory=dict)
    paper_beyond: dict[str, float] = Field(default_factory=dict)


class MethodEntry(Section):
    """A method of the experiment.

    Attributes:
        title: name in tables and figures.
        recipe: keys that override those of the experiment and the case.
        models: number of models sent per round and client, each way: 2 for SCAFFOLD.
        reference: the method whose number is the divisor of this method's ratio; None: `Measure.reference`.
        grids: recipe key → values, as in ``hpcfed sweep --grid``; the best point is compared.
    """

    title: str
    recipe: RecipePart = Field(default_factory=dict)
    models: Count = 1
    reference: str | None = None
    grids: dict[str, str] = Field(default_factory=dict)


TRAINED_FOR_THE_TABLE = ("dynamics", "bounds", "surrogate")
"""Kinds of measure whose rounds leave no record."""


class Measure(Section):
    """The experiment's measurement: the quantity in its table, and the columns in its figures.

    Attributes:
        kind: the quantity. Read from recorded runs: ``rounds``: rounds to the targets; ``final``: mean of the `last`
            evaluations; ``best``: the best evaluation; ``published``: the best and the last evaluation, and whether the
            best agrees with a published mean; ``tuned``: the grid values with the best ``final`` mean; ``projections``:
            FedExP's condition (6); ``sites``: the final model's score on each site's test set and on that of all sites,
            for cases ``sites`` and ``pooled``. Trained for the table without a record: ``dynamics``: terms of FedDyn's
            lemmas and theorems; ``bounds``: terms of FedExP's theorems; ``surrogate``: terms of GeL's theorem. Computed
            without training: ``classes``: number of classes in a client's data; ``coefficients``: weights of a client's
            gradients in GeL.
        column: the measured column of the record.
        last: number of evaluations to average at the end.
        window: number of evaluations in the moving average that targets and ``best`` use; figures average over the
            rounds that so many evaluations span.
        unit: the unit in which the paper counts the cost of reaching a target: rounds, or models sent.
        reference: the method whose numbers are the divisors in a column of ratios; "": no such column.
        beyond: whether to show how far a method's reference is past the target when the method reaches the target.
        savings: whether to show how many fewer bytes and gradients a method's reference needs to reach the target.
        intervals: whether ± is half the 95 % confidence interval of the mean over seeds, not the standard deviation.
        figures: columns of the record to draw against rounds, one figure per column and case.
        cells: the column in the heat maps of methods with two grids; "": the measured column.
        choice: source of the tuned values in `Case.paper`: the paper, or its code if the paper states none.
    """

    kind: Literal[
        "rounds",
        "final",
        "best",
        "published",
        "tuned",
        "projections",
        "sites",
        "classes",
        "coefficients",
        "dynamics",
        "bounds",
        "surrogate",
    ]
    column: str = "test_accuracy"
    last: Count = 1
    window: Count = 1
    unit: Literal["rounds", "models"] = "rounds"
    reference: str = ""
    beyond: bool = False
    savings: bool = False
    intervals: bool = False
    cells: str = ""
    choice: Literal["paper", "code"] = "paper"
    figures: list[str] = Field(default_factory=list)


class Images(Section):
    """A small variant: `Small`, or `Small.images`, which has CIFAR-10 images and is used if their files are available.

    Attributes:
        says: note below the table: what is smaller than in the paper.
        cases: names of the variant's cases; default: all in `Small`, those of `Small` in `Small.images`.
        seeds: number of seeds; default: the experiment's.
        data: keys that replace those of every case's data.
        options: keys added to the options of every case's data.
        recipe: keys that override the recipe of every run.
        targets: targets that replace those of every case; default: the case's own.
    """

    says: str
    cases: list[str] = Field(default_factory=list)
    seeds: Count | None = None
    data: Content = Field(default_factory=dict)
    options: Content = Field(default_factory=dict)
    recipe: RecipePart = Field(default_factory=dict)
    targets: list[Target] = Field(default_factory=list)


class Small(Images):
    """The variant that takes minutes on two cores: the same protocol on smaller data.

    Attributes:
        images: a second variant, on images; its keys are its own, except that `cases` defaults to this variant's.
    """

    images: Images | None = None

    def of(self, case: Case) -> Case:
        """Return the small version of a case; it has none of the paper's numbers, which hold for the paper's data."""
        content = {**case.data.model_dump(), **self.data}
        data = validated(Data, {**content, "options": {**content["options"], **self.options}}, "small.data")
        return case.model_copy(update={"data": data, "targets": self.targets or case.targets, **NO_NUMBERS})


class Cost(Section):
    """The experiment's cost in words, such as time and cores, at the paper's scale and at the small one."""

    full: str = ""
    small: str = ""


class Experiment(Section):
    """An experiment: a file in ``experiments/<paper>/``, or a user's file.

    Attributes:
        name: name of the experiment and of its folder; default: ``<paper>-<file>``, or the name of the user's file.
        title, note: title of the table, and note below it: how and why the experiment differs from the paper.
        paper: name of the paper's folder.
        shows: table or figure of the paper → the cases shown in it; all cases if the list is empty.
        seeds: number of seeds, which are 0, 1, …
        recipe: keys of the recipes of all runs.
        cases, methods: name → case, and name → method, in the order of the table's rows.
        small: the small variant; None if no smaller data preserves the protocol.
    """

    noun: ClassVar[str] = "experiment"
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$")
    title: str
    paper: str = OWN_PAPER
    shows: dict[str, list[str]] = Field(default_factory=dict)
    note: str = ""
    cost: Cost = Cost()
    seeds: Count = 1
    recipe: RecipePart = Field(default_factory=dict)
    cases: dict[str, Case]
    methods: dict[str, MethodEntry] = Field(default_factory=dict)
    measure: Measure
    small: Small | None = None
    _chosen_seeds: tuple[int, ...] = PrivateAttr(())

    @property
    def seed_numbers(self) -> tuple[int, ...]:
        """The seeds of the runs: 0, 1, … unless `with_seeds` has set them."""
        return self._chosen_seeds or tuple(range(self.seeds))

    def with_seeds(self, numbers: Sequence[int]) -> Experiment:
        """Return a copy of the experiment with these seeds."""
        chosen = self.model_copy(update={"seeds": len(numbers)})
        chosen._chosen_seeds = tuple(numbers)
        return chosen

    @property
    def trains(self) -> bool:
        """Whether the experiment's runs are recorded; if not, it examines data or trains only for its table."""
        return self.measure.kind not in ("classes", "coefficients", *TRAINED_FOR_THE_TABLE)

    def at(self, scale: str, *, images: bool = False) -> Experiment:
        """Return the experiment at ``full`` or ``small`` scale; with `images`, the small one on images if it exists.

        Raises:
            InputError: the experiment has no small variant.
        """
        if scale == "full":
            return self
        if self.small is None:
            remedy = "run it with --scale full, or --rounds 2 to try it"
            raise InputError(f"{self.name} has no small variant", remedy=remedy)
        if images and self.small.images:
            own = dict(self.small.images) | {"cases": self.small.images.cases or self.small.cases, "images": None}
            small = self.small.model_copy(update=own)
            name = f"{self.name}-{small.data['source']}"
            return self.model_copy(update={"small": small, "name": name}).at(scale)
        chosen = {name: self.cases[name] for name in self.small.cases or self.cases}
        cases = {name: self.small.of(case) for name, case in chosen.items()}
        seeds, title = self.small.seeds or self.seeds, f"{self.title} (small variant)"
        return self.model_copy(update={"cases": cases, "seeds": seeds, "note": self.small.says, "title": title})

    def limited(self, names: list[str]) -> Experiment:
        """Return a copy of the experiment with the named cases alone, or with all if `names` is empty."""
        return self.model_copy(update={"cases": {n: c for n, c in self.cases.items() if not names or n in names}})

    def methods_of(self, case: Case) -> dict[str, MethodEntry]:
        """Return name → method for the methods of a case: those in `Case.only`, or all."""
        return {name: entry for name, entry in self.methods.items() if not case.only or name in case.only}

    def recipe_parts(self) -> Iterator[Content]:
        """Yield all parts of recipes: the experiment's, the cases', the methods' and the small variants'."""
        yield self.recipe
        for case in self.cases.values():
            yield from (case.recipe, *case.methods.values())
        yield from (entry.recipe for entry in self.methods.values())
        yield from (small.recipe for small in self.small_sections())

    @property
    def metrics(self) -> dict[str, Metric]:
        """Name → metric of ``evaluate.metrics`` in all recipes of the experiment."""
        sections = [part.get("evaluate") or {} for part in self.recipe_parts()]
        return {
            name: a_metric(metric)
            for section in sections
            for name, metric in listed(section.get("metrics") or {}).items()
        }

    def small_sections(self) -> list[Images]:
        """Return the sections of the small variants: none, `small` alone, or `small` and its variant on images."""
        return [section for section in (self.small, self.small and self.small.images) if section is not None]

    def recipe_of(self, case: Case, method: str, scale: str) -> Content:
        """Return the recipe of a run of `method` in a case, without data, seed and output."""
        parts = [self.recipe, case.recipe, self.methods[method].recipe, case.methods.get(method, {})]
        if scale == "small" and self.small:
            parts.append(self.small.recipe)
        merged: Content = {}
        for part in parts:
            merged = merge(merged, {key: _whole(key, value) for key, value in part.items()})
        return merged


def _whole(key: str, value: Any) -> Any:
    """Return the value of a recipe's key, with a short form such as ``seed: 3`` expanded to the whole section."""
    return seed_for_all(value) if key == "seed" else spelled_out(key, value)


def merge(first: Content, second: Content) -> Content:
    """Return recipe keys `first` overridden by `second`, section by section; a value of None removes the key.

    A section of `REPLACED_SECTIONS` is replaced as a whole if `second` gives it a name or a factory.
    """
    merged = dict(first)
    for key, value in second.items():
        section = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(section, dict):
            is_another = key in REPLACED_SECTIONS and ("name" in value or "factory" in value)
            merged[key] = value if is_another else merge(section, value)
        else:
            merged[key] = value
    return merged
