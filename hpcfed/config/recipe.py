"""The recipe: everything that decides a run's result, typed, frozen and complete.

A section is a frozen pydantic model that refuses unknown keys and silent conversions. The sections ``model`` and
``algorithm`` accept further keys unchecked; the typed class of the model or method checks them.
"""

from __future__ import annotations

import itertools
from math import log10
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from hpcfed.config.clients import BatchSize, EvaluateClients, Without, a_client_or_several
from hpcfed.config.limits import (
    A_SCHEDULE,
    A_TIME_OR_0,
    REAL_RANGE,
    Checkpoint,
    Count,
    LrFrom,
    Period,
    Section,
    Stop,
    a_guess,
    a_schedule,
    a_time_or_0,
    a_tuple,
    on_or_off,
)
from hpcfed.config.metrics import ALWAYS_MEASURED, CLIENT_COLUMNS, METRICS_SCHEMA, NAME, Metric, a_metric, listed, plain
from hpcfed.config.observer import Observer, Reference, named
from hpcfed.config.parameters import Parameters

LETTERS = r"A-Za-z0-9\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u02FF\u0370-\u037D\u037F-\u1FFF\u2C00-\u2FEF\u3041-\uD7FF"
"""Digits, and letters of any script, nearly as XML 1.0 has them: regular expressions of Rust, Python and JavaScript,
which read the schema, have no class of letters in common."""


class Model(Section):
    """The model: a built-in one by `name`, with its keys, or the user's by `factory` and `args`.

    `init` names a safetensors file with the initial parameters.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)
    name: str | None = None
    factory: Reference | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    init: Path | None = None

    @model_validator(mode="after")
    def _name_or_factory(self) -> Model:
        if (self.name is None) == (self.factory is None):
            raise ValueError("exactly one of 'name' and 'factory'")
        if self.factory is None and self.args:
            raise ValueError("'args' only beside 'factory'")
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """The keys that belong to the named model."""
        return dict(self.model_extra or {})


class Algorithm(Section):
    """The federated method: a built-in one by `name`, a combination of parts, or the user's by `factory`; and its keys.

    A combination names its `local` and `server` parts and how to `normalize` clients' work; an omitted one is FedAvg's.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)
    name: str | None = None
    factory: Reference | None = None
    local: str | None = None
    normalize: Literal["none", "steps"] | None = None
    server: str | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Algorithm:
        if (self.name is not None) + (self.factory is not None) + self.is_combination != 1:
            raise ValueError("one of 'name', 'factory', and parts ('local', 'normalize', 'server')")
        return self

    @model_serializer(mode="wrap")
    def _what_is_given(self, serialize: Any) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if value is not None}

    @property
    def is_combination(self) -> bool:
        """Whether the method is put together from named parts."""
        return (self.local, self.normalize, self.server) != (None, None, None)

    @property
    def parameters(self) -> dict[str, Any]:
        """The keys that belong to the method."""
        return dict(self.model_extra or {})


class LossSection(Section):
    """The loss of one sample, and how a minibatch combines its samples.

    By `name` (``auto`` is the task's default), or the user's: `factory`, called with `args`, returns a function
    (output, target) → one loss per sample, like ``torch.nn:CrossEntropyLoss`` with ``reduction: none``. `weights`
    multiply each sample's loss by its class's: ``balanced`` is n / (C · n_c) from all training samples,
    ``balanced-by-site`` from each client's own, in training alone.
    """

    later: ClassVar[frozenset[str]] = frozenset({"weights"})

    name: Literal["auto", "cross-entropy", "binary-cross-entropy", "squared", "cox"] = "auto"
    factory: Reference | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    reduction: Literal["mean", "sum"] = "mean"
    weights: Literal["balanced", "balanced-by-site"] | list[Annotated[float, Field(gt=0)]] | None = None

    @model_validator(mode="after")
    def _name_or_factory(self) -> LossSection:
        if self.factory is not None and self.weights is not None:
            raise ValueError("'weights' only with built-in losses")
        if self.factory is not None and self.name != "auto":
            raise ValueError("'name' or 'factory', not both")
        if self.factory is None and self.args:
            raise ValueError("'args' only beside 'factory'")
        return self


class Seeds(Section):
    """One seed per purpose, so that one can be varied while the others stay."""

    model: int = Field(default=0, ge=0, lt=2**63)
    cohort: int = Field(0, ge=0, lt=2**63)
    batches: int = Field(0, ge=0, lt=2**63)


def seed_for_all(value: Any) -> Any:
    """Expand ``seed: 7`` to a seed per purpose."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"model": value, "cohort": value, "batches": value}
    return value


class CohortSection(Section):
    """Which clients take part in a round: `size` or `fraction` of them, or a `schedule`; by default all.

    A schedule is a JSON file with a list over rounds of lists of clients; or such a list here, which is repeated:
    ``[[2]]`` is client 2 alone, ``[[0], [1], [2]]`` a model that travels.

    `stream: authors` draws as FedDyn's code does, which repeats cohorts: round t from seed ``seed.cohort`` + t − 1, or
    from the next one whose cohort is not empty.
    """

    later: ClassVar[frozenset[str]] = frozenset({"stream", "without"})
    size: Count | None = None
    fraction: float | None = Field(None, gt=0, le=1)
    sampling: Literal["uniform", "bernoulli"] = "uniform"
    stream: Literal["own", "authors"] = "own"
    schedule: Annotated[Path | list[list[int]] | None, PlainValidator(a_schedule), WithJsonSchema(A_SCHEDULE)] = None
    without: Annotated[Without | None, BeforeValidator(a_client_or_several)] = None

    @model_validator(mode="after")
    def _one_rule(self) -> CohortSection:
        if sum(rule is not None for rule in (self.size, self.fraction, self.schedule)) > 1:
            raise ValueError("one of 'size', 'fraction' and 'schedule'")
        if self.schedule is not None and self.sampling != "uniform":
            raise ValueError("no 'sampling' beside 'schedule'")
        if self.schedule is not None and self.without is not None and self.without.cohorts == "redrawn":
            raise ValueError("'cohorts: empty' in 'without' beside 'schedule', which leaves nothing to draw")
        if self.stream == "authors" and self.sampling != "bernoulli":
            raise ValueError("'sampling: bernoulli' beside 'stream: authors'")
        return self

    def size_in(self, num_clients: int) -> int | None:
        """Return |S| in a federation of N clients, expected under Bernoulli sampling; None with a schedule."""
        if self.schedule is not None:
            return None
        if self.fraction is not None:
            return max(1, round(self.fraction * num_clients))
        return self.size or num_clients


class Augment(Section):
    """Random augmentation of training images, after normalisation: shifts and flips.

    `crop` pads each side with that many zeros and crops to the old size at random, with `crop_probability`; `flip` is
    the probability of a horizontal flip; `per` is the unit that shares a draw, ``sample`` or ``batch``. FedExP's code
    is ``{crop: 4, flip: 0.5, per: batch}``, FedDyn's ``{crop: 4, crop_probability: 0.5, flip: 0.5}``.
    """

    crop: int = Field(0, ge=0, le=256)
    crop_probability: float = Field(1.0, gt=0, le=1)
    flip: float = Field(0.0, ge=0, le=1)
    per: Literal["sample", "batch"] = "sample"

    @model_validator(mode="after")
    def _something_given(self) -> Augment:
        if self.crop == 0 and self.flip == 0:
            raise ValueError("'crop' or 'flip'")
        return self


class Local(Section):
    """The work of one client in one round.

    The step size of round t is ``lr`` · ``lr_decay``^(t−1); or ``lr``, replaced at each `round` of ``lr_schedule``.
    `step` names the user's own local step (`hpcfed.client.own_step`), called with `step_args` as keywords.
    """

    later: ClassVar[frozenset[str]] = frozenset({"lr_schedule", "guess_moments", "step", "step_args", "tile", "graphs"})

    steps: Count | None = None
    epochs: Count | None = None
    batch_size: BatchSize = 50
    lr: float = Field(0.1, gt=0)
    lr_decay: float = Field(1.0, gt=0)
    lr_schedule: Annotated[tuple[LrFrom, ...], BeforeValidator(a_tuple)] = ()
    weight_decay: float = Field(0.0, ge=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    clip_norm: float | None = Field(None, gt=0)
    clip: Literal["all", "linear"] = "all"
    optimizer: Literal["sgd", "adam", "yogi"] = "sgd"
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    guess_moments: Literal["first", "all"] = "first"
    augment: Augment | None = None
    engine: Literal["auto", "sequential", "batched"] = "auto"
    tile: Literal["auto"] | Count = "auto"
    matmul: Literal["auto", "blas", "onednn"] = "auto"
    compile: bool = False
    graphs: Literal["auto", "off"] = "auto"
    step: Reference | None = None
    step_args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Local:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("'steps' or 'epochs', not both")
        if self.lr_schedule and self.lr_decay != 1.0:
            raise ValueError("'lr_decay' or 'lr_schedule', not both")
        rounds = [entry.round for entry in self.lr_schedule]
        if any(later <= earlier for earlier, later in itertools.pairwise(rounds)):
            raise ValueError("rounds in 'lr_schedule' in their order, each once")
        if self.optimizer != "sgd" and self.momentum:
            raise ValueError(f"no 'momentum' with optimizer {self.optimizer}, whose first moment is 'beta1'")
        changed = self.model_fields_set & {"beta1", "beta2", "eps"}
        if self.optimizer == "sgd" and any(
            getattr(self, key) != type(self).model_fields[key].default for key in changed
        ):
            raise ValueError("'beta1', 'beta2' and 'eps' only with optimizer adam or yogi")
        if self.optimizer == "sgd" and self.guess_moments == "all":
            raise ValueError("'guess_moments: all' only with optimizer adam or yogi: momentum is SGD's only moment")
        return self

    @model_validator(mode="after")
    def _step_takes_the_place(self) -> Local:
        if self.step is None:
            if self.step_args:
                raise ValueError("'step_args' only beside 'step'")
            return self
        for key in ("optimizer", "momentum", "weight_decay", "clip_norm", "clip", "compile"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"no {key!r} beside 'step', which takes the place of the built-in steps")
        return self


class Budget(Section):
    """Local steps τ_i that each client can afford: drawn from {low..high} per client and round, or from a schedule."""

    low: Count | None = None
    high: Count | None = None
    schedule: Path | None = None

    @model_validator(mode="after")
    def _range_or_schedule(self) -> Budget:
        if (self.low is None) != (self.high is None) or (self.schedule is None) == (self.low is None):
            raise ValueError("either 'low' and 'high', or 'schedule'")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError("'low' no larger than 'high'")
        return self


class Periodic(Section):
    """A period in rounds; 0 means never."""

    every: Period = 0


class Evaluate(Section):
    """How often to evaluate test (optionally training) loss and accuracy, and of which model.

    `metrics` names built-in metrics (`hpcfed.config.metrics.BUILT_IN`) and user functions; the record has them as
    ``test_<name>`` (and ``train_<name>``), ``clients.csv`` as columns. `statistics` are the averaged running statistics
    of that model: the round's, or estimated anew on all ``training`` samples (`hpcfed.evaluation.statistics`).
    `precision` is that of the products, ``run``: the recipe's own.
    `model` is ``auto`` until the recipe is resolved, which takes the method's own (`hpcfed.types.Method.final_model`).
    """

    later: ClassVar[frozenset[str]] = frozenset({"statistics", "precision"})

    every: Period = 1
    model: Literal["auto", "last", "last-two", "cohort-average", "client-average", "step-average"] = "auto"
    statistics: Literal["round", "training"] = "round"
    train: Periodic = Periodic()
    clients: EvaluateClients = EvaluateClients()
    batch_size: Count = 1000
    precision: Literal["float32", "run"] = "float32"
    metrics: Annotated[
        dict[Annotated[str, Field(pattern=NAME)], Annotated[Metric, PlainValidator(a_metric), PlainSerializer(plain)]],
        BeforeValidator(listed),
        WithJsonSchema(METRICS_SCHEMA),
    ] = Field(default_factory=dict)

    _by_method: bool = PrivateAttr(False)

    @property
    def by_method(self) -> bool:
        """Whether `model` was ``auto`` before the recipe was resolved."""
        return self._by_method

    def with_final_model(self, name: str) -> Evaluate:
        """Return the section with a method's final model in the place of ``auto``."""
        if self.model != "auto":
            return self
        chosen = self.model_copy(update={"model": name})
        chosen._by_method = True
        return chosen

    @model_validator(mode="after")
    def _names_are_free(self) -> Evaluate:
        if self.metrics.keys() & {*ALWAYS_MEASURED}:
            raise ValueError(
                f"names in 'metrics' other than {' and '.join(ALWAYS_MEASURED)}, which are measured anyway"
            )
        if taken := [name for name in self.metrics if name in CLIENT_COLUMNS]:
            columns = ", ".join(CLIENT_COLUMNS)
            raise ValueError(f"names in 'metrics' other than the columns of clients.csv: {columns}; not {taken[0]!r}")
        return self

    @model_validator(mode="after")
    def _last_models_are_kept(self) -> Evaluate:
        if "last" in self.clients.models and self.model != "client-average":
            raise ValueError("'model: client-average', which keeps the clients' last models, for 'last' in 'clients'")
        return self


class Recipe(Section):
    """The recipe of a run; docs/recipe.md explains its fields, the docstrings of sections theirs."""

    later: ClassVar[frozenset[str]] = frozenset({"parameters", "update_hashes", "bits", "deterministic", "sentinel"})

    name: str = Field(min_length=1, pattern=rf"^[{LETTERS}][{LETTERS}._ -]*$")
    seed: Annotated[Seeds, BeforeValidator(seed_for_all)] = Seeds()
    data: Path
    data_content: str | None = None
    verify_data: bool = False
    data_access: Literal["mmap", "memory", "stage"] = "mmap"
    model: Model
    parameters: Parameters = Parameters()
    loss: LossSection = LossSection()
    dtype: Literal["float32", "float64"] = "float32"
    precision: Literal["float32", "tf32", "bf16-mixed"] = "float32"
    bits: Literal["native", "portable"] = "native"
    deterministic: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(1, ge=1, le=1024)
    rounds: Count
    cohort: CohortSection = CohortSection()
    weights: Literal["samples", "uniform"] | None = None
    local: Local
    budget: Budget | None = None
    guess: Annotated[int | Literal["none", "remaining", "limit"], PlainValidator(a_guess)] = "none"
    algorithm: Algorithm
    evaluate: Evaluate = Evaluate()
    stop: Stop = Stop()
    checkpoint: Checkpoint = Checkpoint()
    update_hashes: bool = False
    observers: Annotated[list[Observer], BeforeValidator(named)] = Field(default_factory=list)
    on_bad_client: Literal["stop", "skip"] = "stop"
    sentinel: Annotated[Literal["on", "off", "strict"], BeforeValidator(on_or_off)] = "on"
    watchdog: Annotated[int | str, PlainValidator(a_time_or_0), WithJsonSchema(A_TIME_OR_0)] = "30min"
    client_state: Literal["device", "host", "disk"] = "device"
    reduction: Literal["exact", "fast"] = "exact"
    gpu_reduce: Literal["auto", "host", "mpi", "nccl"] = "auto"
    placement: Literal["auto", "static", "balanced"] = "auto"
    python_path: list[Path] = Field(default_factory=list)
    output: Path
    _where: str = PrivateAttr("recipe")

    @property
    def where(self) -> str:
        """The file it was read from, for messages."""
        return self._where

    def read_from(self, where: str) -> Recipe:
        """Set `where`, and return the recipe."""
        self._where = where
        return self

    def __eq__(self, other: object) -> bool:
        """Whether all keys are equal, wherever they were read."""
        return isinstance(other, Recipe) and dict(self) == dict(other)

    __hash__ = Section.__hash__

    def balances(self, stateful: bool) -> bool:
        """Return whether cohorts are spread over ranks by work; `auto` balances only clients without a state."""
        has_state = stateful or self.parameters.keeps_private
        return self.placement == "balanced" or (self.placement == "auto" and not has_state)

    @model_validator(mode="after")
    def _parts_fit(self) -> Recipe:
        if self.local.epochs is not None and self.budget is not None:
            raise ValueError("'local.steps' instead of 'local.epochs' beside 'budget'")
        if self.guess == "remaining" and self.budget is not None and self.local.steps is None:
            raise ValueError("'local.steps', the steps asked for, beside 'budget' and 'guess: remaining'")
        if self.cohort.stream == "authors" and self.seed.cohort >= 2**31:
            raise ValueError("'seed.cohort' below 2^31 beside 'cohort.stream: authors': NumPy's old seeds end at 2^32")
        largest = log10(self.local.lr) + (self.rounds - 1) * log10(self.local.lr_decay)
        if self.local.lr <= REAL_RANGE[1] and largest > log10(REAL_RANGE[1]):
            raise ValueError(
                f"'local.lr_decay' with which the step size of round {self.rounds} is at most {REAL_RANGE[1]:g}"
            )
        if self.reduction == "fast" and self.dtype == "float64":
            raise ValueError("'reduction: exact' beside 'dtype: float64': fast sums are float32")
        if not self.deterministic and self.sentinel == "strict":
            raise ValueError("'sentinel: off' beside 'deterministic: false': a client trained again has other bits")
        if self.precision != "float32" and self.dtype != "float32":
            raise ValueError("'dtype: float32' beside 'precision'")
        if self.evaluate.every == 0 and self.stop.by_scores:
            raise ValueError("'evaluate.every' of at least 1 beside 'stop'")
        return self
