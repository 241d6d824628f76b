"""The recipe: everything that decides a run's result, typed, frozen and complete.

A section is a frozen pydantic model that refuses unknown keys and silent conversions. The sections ``model`` and
``algorithm`` accept further keys unchecked; the typed class of the model or method checks them.
"""

from __future__ import annotations

import itertools
import json
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
    A_WATCHDOG,
    REAL_RANGE,
    Checkpoint,
    Count,
    LrFrom,
    Period,
    Section,
    SecureAggregation,
    Stop,
    a_guess,
    a_schedule,
    a_tuple,
    a_watchdog,
    on_or_off,
)
from hpcfed.config.metrics import ALWAYS_MEASURED, CLIENT_COLUMNS, METRICS_SCHEMA, NAME, Metric, a_metric, listed, plain
from hpcfed.config.observer import Observer, Reference, named
from hpcfed.config.parameters import Parameters
from hpcfed.config.secret import A_SECRET, a_secret, content_of, read_secret
from hpcfed.config.updates import ChainPart, parts_named

LETTERS = r"A-Za-z0-9\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u02FF\u0370-\u037D\u037F-\u1FFF\u2C00-\u2FEF\u3041-\uD7FF"
"""Digits, and letters of any script, nearly as XML 1.0 has them: regular expressions of Rust, Python and JavaScript,
which read the schema, have no class of letters in common."""


class Model(Section):
    """The model: a built-in one by `name`, with its keys, or the user's by `factory` and `args`.

    `init` names a safetensors file with the initial parameters.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)
    name: str | None = None
    """The built-in model."""
    factory: Reference | None = None
    """Your model, `"module:function"`: returns a `torch.nn.Module`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `factory`."""
    init: Path | None = None
    """A safetensors file with the initial parameters."""

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
    """The method."""
    factory: Reference | None = None
    """Yours, `"module:function"`: returns a `hpcfed.types.Method`; further keys are its arguments
    (docs/methods.md)."""
    local: str | None = None
    """Client rule of a combination: `{local: prox, normalize: steps, server: yogi, mu: 0.1}`."""
    normalize: Literal["none", "steps"] | None = None
    """Treatment of different numbers of steps in a combination: `none` or `steps` (FedNova's)."""
    server: str | None = None
    """Server step of a combination."""

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
    (output, target) → one loss per sample. ``torch.nn:CrossEntropyLoss``, ``MSELoss`` and ``BCEWithLogitsLoss`` are
    known, also as they are, with the recipe's reduction. `weights` multiply each sample's loss by its class's:
    ``balanced`` is n / (C · n_c) from all training samples, ``balanced-by-site`` from each client's own, in training
    alone.
    """

    later: ClassVar[frozenset[str]] = frozenset({"weights"})

    name: Literal["auto", "cross-entropy", "binary-cross-entropy", "squared", "cox"] = "auto"
    """`cross-entropy`, `binary-cross-entropy`, `squared` (½‖·‖²), `cox` (partial likelihood of a minibatch, for
    event and time); `auto`: the task's."""
    factory: Reference | None = None
    """Your loss, `"module:function"`: returns a function (output, target) → one loss per sample."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `factory`."""
    reduction: Literal["mean", "sum"] = "mean"
    """`mean` or `sum` over a minibatch."""
    weights: Literal["balanced", "balanced-by-site"] | list[Annotated[float, Field(gt=0)]] | None = None
    """Of classes: `balanced` (n / (C n_c) of all training samples), `balanced-by-site` (of each client's own, in
    training alone) or `[1, 3]`."""

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
    """Initial parameters."""
    cohort: int = Field(0, ge=0, lt=2**63)
    """Cohorts and budgets."""
    batches: int = Field(0, ge=0, lt=2**63)
    """Minibatches and augmentation, and methods' own streams."""


def seed_for_all(value: Any) -> Any:
    """Expand ``seed: 7`` to a seed per purpose."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"model": value, "cohort": value, "batches": value}
    return value


class CohortSection(Section):
    """Which clients take part in a round: `size` or `fraction` of them, or a `schedule`; by default all.

    A schedule is a JSON file with a list of clients for each round; or a list of such lists here, which is repeated:
    ``[[2]]`` is client 2 alone, ``[[0], [1], [2]]`` a model that travels.

    `stream: authors` draws as FedDyn's code does, which repeats cohorts: round t from seed ``seed.cohort`` + t − 1, or
    from the next one whose cohort is not empty.
    """

    later: ClassVar[frozenset[str]] = frozenset({"stream", "without"})
    size: Count | None = None
    """Number of clients."""
    fraction: float | None = Field(None, gt=0, le=1)
    """Share of the clients."""
    sampling: Literal["uniform", "bernoulli"] = "uniform"
    """`uniform`: exactly as many, without replacement; `bernoulli`: each with that probability."""
    stream: Literal["own", "authors"] = "own"
    """`authors` draws Bernoulli cohorts as FedDyn's code does."""
    schedule: Annotated[Path | list[list[int]] | None, PlainValidator(a_schedule), WithJsonSchema(A_SCHEDULE)] = None
    """Lists of clients: a JSON file with one for each round, or some here, which are repeated: `[[2]]` is client 2
    alone, `[[0], [1], [2]]` a model that travels."""
    without: Annotated[Without | None, BeforeValidator(a_client_or_several)] = None
    """Clients that never take part, by number or name: `[hospital-3]` (docs/checking.md)."""

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
    """Pixels of padding on each side, cropped at random."""
    crop_probability: float = Field(1.0, gt=0, le=1)
    """Share of the draws that are cropped."""
    flip: float = Field(0.0, ge=0, le=1)
    """Probability of a horizontal flip."""
    per: Literal["sample", "batch"] = "sample"
    """Unit that shares a draw: `sample` or `batch`."""

    @model_validator(mode="after")
    def _something_given(self) -> Augment:
        if self.crop == 0 and self.flip == 0:
            raise ValueError("'crop' or 'flip'")
        return self


class SampleNoise(Section):
    """Noise on the steps of clients, which hides each sample (`hpcfed.client.sample_noise`)."""

    clip: float = Field(gt=0)
    """Largest norm of a sample's gradient."""
    multiplier: float | None = Field(None, gt=0)
    """Standard deviation of the noise, in units of `clip`."""
    epsilon: float | None = Field(None, gt=0)
    """Or the ε that has to hold after all rounds."""
    delta: float | None = Field(None, gt=0, lt=1)
    """Default: n^-1.1 of the largest client."""

    @model_validator(mode="after")
    def _some_noise(self) -> SampleNoise:
        if self.multiplier is None and self.epsilon is None:
            raise ValueError("'multiplier' or 'epsilon'")
        return self


class Local(Section):
    """The work of one client in one round.

    The step size of round t is ``lr`` · ``lr_decay``^(t−1); or ``lr``, replaced at each `round` of ``lr_schedule``.
    `step` names the user's own local step (`hpcfed.client.own_step`), called with `step_args` as keywords.
    """

    later: ClassVar[frozenset[str]] = frozenset(
        {"lr_schedule", "guess_moments", "step", "step_args", "tile", "memory_format", "graphs", "noise"}
    )

    steps: Count | None = None
    """Minibatch steps of a client in a round."""
    epochs: Count | None = None
    """Or passes over its samples, ⌈n_i/B⌉ steps each."""
    batch_size: BatchSize = 50
    """Samples of a minibatch; `full`: all of the client's."""
    lr: float = Field(0.1, gt=0)
    """Step size η_l."""
    lr_decay: float = Field(1.0, gt=0)
    """Learning rate decay: factor of the step size from round to round."""
    lr_schedule: Annotated[tuple[LrFrom, ...], BeforeValidator(a_tuple)] = ()
    """Step sizes from certain rounds on: `[{round: 51, lr: 0.05}]`."""
    weight_decay: float = Field(0.0, ge=0)
    """Of all parameters."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Of SGD."""
    clip_norm: float | None = Field(None, gt=0)
    """Largest norm of a step's gradient g, which is multiplied by `clip_norm / (‖g‖ + 10⁻⁶)` where that is below 1."""
    clip: Literal["all", "linear"] = "all"
    """What `clip_norm` bounds: `all`, gradient and method's term together; `linear`: the method's μ y is added
    after."""
    optimizer: Literal["sgd", "adam", "yogi"] = "sgd"
    """`sgd`, `adam` or `yogi`; its state begins anew in each round."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """First moment's decay of Adam and Yogi."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Second moment's."""
    eps: float = Field(1e-8, gt=0)
    """Added to their root."""
    guess_moments: Literal["first", "all"] = "first"
    """Moments that decay in a guess: `first`, or `all` (the second one, too)."""
    augment: Augment | None = None
    """Random shifts and flips of training images."""
    engine: Literal["auto", "sequential", "batched"] = "auto"
    """`batched`: clients together, in tiles; `sequential`: one after another; `auto`: batched for models that can be
    read (docs/own-project.md)."""
    tile: Literal["auto"] | Count = "auto"
    """Slots of a tile; part of the result (docs/bits.md)."""
    matmul: Literal["auto", "blas", "onednn"] = "auto"
    """Large products of perceptrons by `blas` (MKL) or `onednn`; `auto`: oneDNN on AMD from Zen 5 on. `hpcfed bench
    calibrate RECIPE` measures both."""
    memory_format: Literal["auto", "contiguous", "channels-last"] = "auto"
    """Of images in convolutions; `auto`: `channels-last` on a CPU, but `contiguous` for models with group norms."""
    compile: bool = False
    """Have torch compile the model."""
    graphs: Literal["auto", "off"] = "auto"
    """`auto`: a GPU takes recorded steps; `off`: step by step, to the same bits (docs/gpu.md)."""
    noise: SampleNoise | None = None
    """DP-SGD: `{clip: 1.0, multiplier: 1.0}` hides each sample (docs/privacy.md)."""
    step: Reference | None = None
    """Your own step in place of all that, `"module:function"` (docs/methods.md)."""
    step_args: dict[str, Any] = Field(default_factory=dict)
    """Keywords of `step`."""

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
        for key in ("optimizer", "momentum", "weight_decay", "clip_norm", "clip", "compile", "noise"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"no {key!r} beside 'step', which takes the place of the built-in steps")
        return self


class Budget(Section):
    """Local steps τ_i that each client can afford: drawn from {low..high} per client and round, or from a schedule."""

    low: Count | None = None
    """Fewest steps, drawn for each client and round."""
    high: Count | None = None
    """Most steps."""
    schedule: Path | None = None
    """A JSON file, a list over rounds of lists of τ_i in the cohort's order."""

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
    """In rounds; 0: never."""


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
    """Rounds between evaluations on the test set; 0: never."""
    model: Literal["auto", "last", "last-two", "cohort-average", "client-average", "step-average"] = "auto"
    """`last`, `last-two`, `cohort-average`, `client-average`, `step-average` (of all iterates, by η_g); `auto`: the
    method's own (table below)."""
    statistics: Literal["round", "training"] = "round"
    """`training`: the evaluated model's averaged running statistics are estimated anew on all training samples."""
    train: Periodic = Periodic()
    """On all clients' training sets."""
    clients: EvaluateClients = EvaluateClients()
    """The measures of `evaluate` on each client's own samples, a row a client in `clients.csv`; their mean, worst
    decile and variance in the record."""
    batch_size: Count = 1000
    """Samples of a chunk of the test set."""
    precision: Literal["float32", "run"] = "float32"
    """`run`: the recipe's `precision`, in evaluations, too."""
    metrics: Annotated[
        dict[Annotated[str, Field(pattern=NAME)], Annotated[Metric, PlainValidator(a_metric), PlainSerializer(plain)]],
        BeforeValidator(listed),
        WithJsonSchema(METRICS_SCHEMA),
    ] = Field(default_factory=dict)
    """Built-in (list below) and your own: `[auroc, {top3: "module:function"}]`; on the test set, the training sets
    and each client; recorded as `test_auroc`, `test_top3`."""

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

    later: ClassVar[frozenset[str]] = frozenset(
        {
            *("parameters", "update_hashes", "bits", "deterministic", "sentinel", "updates", "means", "down"),
            *("secure_aggregation", "secret_seed", "secret_commitment"),
        }
    )

    name: str = Field(min_length=1, pattern=rf"^[{LETTERS}][{LETTERS}._ -]*$")
    """Name of the run; default: the recipe file's."""
    seed: Annotated[Seeds, BeforeValidator(seed_for_all)] = Seeds()
    """Seed of all random streams, or one for each; `seeds: [0, 1, 2]` in its place runs each, in `<output>/seed-0`
    and so on."""
    secret_seed: Annotated[Path | dict[str, str] | None, PlainValidator(a_secret), WithJsonSchema(A_SECRET)] = None
    """Of private runs: a file of 32 random hexadecimal digits or more, or `{env: NAME}`; noise, cohorts and minibatches
    are drawn from it (docs/privacy.md)."""
    secret_commitment: str | None = None
    data: Path
    """The federation file."""
    data_content: str | None = None
    verify_data: bool = False
    """Read all data and compare their hash at each start; else where a run goes on and the file's size, time of
    change or inode has changed."""
    data_access: Literal["mmap", "memory", "stage"] = "mmap"
    """`mmap`; `memory`: ordinary reads; `stage`: a copy on each host's local scratch ($TMPDIR), made at the
    start."""
    model: Model
    """A built-in model with its keys (table below), or yours by `factory`; short: `model: mlp`."""
    parameters: Parameters = Parameters()
    """Roles of the module's parameters and buffers, by patterns of their names: docs/own-project.md."""
    loss: LossSection = LossSection()
    """Loss of a sample, and of a minibatch; short: `loss: squared`."""
    dtype: Literal["float32", "float64"] = "float32"
    """`float64` for verification."""
    precision: Literal["float32", "tf32", "bf16-mixed"] = "float32"
    """Of the local solve's products alone: `tf32` on GPUs, `bf16-mixed`."""
    bits: Literal["native", "portable"] = "native"
    """`portable`: linear models with the same bits on every processor, with one version of torch and NumPy; slower
    (docs/bits.md)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`cpu` or `cuda`; `auto` takes a GPU if there is one, but for models too small for it (docs/gpu.md)."""
    deterministic: bool = True
    """`false`: a GPU's kernels may add in any order, faster; the record then says `bitwise: false` (docs/gpu.md)."""
    threads: int = Field(1, ge=1, le=1024)
    """Threads of torch in each rank; part of the result, like the seed."""
    rounds: Count
    """Number of rounds; each trains a cohort."""
    cohort: CohortSection = CohortSection()
    """Clients of a round, by default all; short: `cohort: 20`, `cohort: 0.1`."""
    weights: Literal["samples", "uniform"] | None = None
    """`samples` (n_i/n) or `uniform`; default: the method's own (table below)."""
    local: Local
    """The work of one client in one round."""
    budget: Budget | None = None
    """Local steps that each client can afford, beside `local.steps`, those asked for."""
    guess: Annotated[int | Literal["none", "remaining", "limit"], PlainValidator(a_guess)] = "none"
    """`remaining`: after its τ_i steps a client guesses the rest of `local.steps` (GeL); `10`: so many; `limit`:
    infinitely many. Needs `momentum`, Adam or Yogi."""
    algorithm: Algorithm
    """A method by `name` with its keys (table below), a combination of parts, or yours by `factory`; short:
    `algorithm: fedavg`."""
    updates: Annotated[list[ChainPart], BeforeValidator(parts_named)] = Field(default_factory=list)
    """What happens to each client's vectors on their way to the sum, in order: `[{topk: {fraction: 0.01}}, sign]`
    (docs/updates.md)."""
    means: Annotated[list[ChainPart], BeforeValidator(parts_named)] = Field(default_factory=list)
    """What happens to the round's means before the server's step, likewise: `[{clip: {norm: 1.0}}]`."""
    down: Annotated[list[ChainPart], BeforeValidator(parts_named)] = Field(default_factory=list)
    """How the model is packed for a round's clients, who start from what they unpack: `[{quantize: {bits: 8}}]`."""
    secure_aggregation: SecureAggregation | None = None
    """Masked sums, simulated, behind a `clip` in `updates`: `{dropout: 0.1}` (docs/updates.md)."""
    evaluate: Evaluate = Evaluate()
    """Evaluations on the test set, the training sets and each client."""
    stop: Stop = Stop()
    """Ends a run before its last round; a wall-clock limit stops it with a checkpoint."""
    checkpoint: Checkpoint = Checkpoint()
    """When to save the run, and which checkpoints to keep."""
    update_hashes: bool = False
    """A 64-bit hash of each client's update, 8 bytes a client and round in `update-hashes.bin`."""
    observers: Annotated[list[Observer], BeforeValidator(named)] = Field(default_factory=list)
    """Called after each round, on rank 0, without effect on the result; short: `observers: [tensorboard, wandb,
    mlflow]` (events, an offline run and a database in `logs/`)."""
    on_bad_client: Literal["stop", "skip"] = "stop"
    """`skip`: a round goes on without a client whose training failed or whose update is not finite."""
    sentinel: Annotated[Literal["on", "off", "strict"], BeforeValidator(on_or_off)] = "on"
    """Trains at most 1 % of the tiles once more elsewhere and compares updates; `strict` ends a run where they
    differ (exit code 4). Without effect on the result."""
    watchdog: Annotated[int | str, PlainValidator(a_watchdog), WithJsonSchema(A_WATCHDOG)] = "auto"
    """How long one client's training may take, or a rank be silent. `auto`: 30 minutes at first; from round 2 on 5
    minutes, or for training ten times the longest round. 0: for ever."""
    client_state: Literal["device", "host", "disk"] = "device"
    """Where clients' states lie between rounds: `device`, then `host` where it is full, then `disk` ($TMPDIR).
    Without effect on the result: a run may go on with another."""
    reduction: Literal["exact", "fast"] = "exact"
    """`fast`: float32 sums, half the bytes; the record then says `bitwise: false`."""
    gpu_reduce: Literal["auto", "host", "mpi", "nccl"] = "auto"
    """`mpi`: a CUDA-aware MPI reduces the GPU's memory; `host`: through pinned host memory; `nccl`: from GPU to
    GPU, a rank a GPU."""
    placement: Literal["auto", "static", "balanced"] = "auto"
    """`balanced`: cohorts spread over ranks by measured costs, states move along; `static`: clients stay, the default
    of methods with states. No effect on the result: a run may go on with another."""
    python_path: list[Path] = Field(default_factory=list)
    output: Path
    """The run folder; default: `runs/<name>`."""
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

    @property
    def own_rules(self) -> list[str]:
        """The user's own method, and parts of lists, by their ``factory``."""
        factories = self.algorithm.factory, *(part.factory for part in self.chain_parts)
        return [factory for factory in factories if factory is not None]

    @property
    def chain_parts(self) -> list[ChainPart]:
        """The parts of `updates`, `means` and `down`."""
        return [*self.updates, *self.means, *self.down]

    @property
    def is_private(self) -> bool:
        """Whether noise hides clients, so that a run has an ε, and withholds what is not noised."""
        return self.noise_at is not None

    @property
    def noise_at(self) -> Literal["server", "clients"] | None:
        """Who adds noise."""

        def adds(parts: list[ChainPart]) -> bool:
            return any(part.name == "noise" and part.args.get("multiplier") != 0 for part in parts)

        return "server" if adds(self.means) else "clients" if adds(self.updates) else None

    @property
    def secret(self) -> int | None:
        """The secret seed of a resolved recipe, another one for other values of what decides its rounds; None without.

        Raises:
            InputError: it cannot be read, or is not the run's.
        """
        if self.secret_seed is None:
            return None
        decides = self.model_dump(
            mode="json",
            include={
                **dict.fromkeys(("name", "seed", "data_content", "weights", "algorithm", "updates", "means"), True),
                **dict.fromkeys(("model", "loss", "parameters", "dtype", "precision", "guess"), True),
                **dict.fromkeys([key for key in ("down", "secure_aggregation") if getattr(self, key)], True),
                "cohort": {"size", "fraction", "sampling", *(["without"] if self.cohort.without is not None else [])},
                "budget": {"low", "high"},
                "local": True,
            },
            exclude={
                "local": {"engine", "matmul", "tile", "memory_format", "graphs"},  # chosen where it runs
                "model": {"init"},  # a path
            },
        )
        of_files = {
            "init": self.model.init,
            "cohorts": self.cohort.schedule,
            "budget": self.budget and self.budget.schedule,
        }
        decides |= {key: content_of(value) for key, value in of_files.items() if value is not None}
        return read_secret(self.secret_seed, self.secret_commitment, json.dumps(decides, sort_keys=True))

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
        if self.local.noise is not None and self.is_private:
            raise ValueError("'noise' in one of 'local', 'updates' and 'means'")
        if self.secret_seed is not None and not (self.is_private or self.local.noise is not None):
            raise ValueError("'noise' in 'means', 'updates' or 'local' beside 'secret_seed', for private runs alone")
        if self.evaluate.every == 0 and self.stop.by_scores:
            raise ValueError("'evaluate.every' of at least 1 beside 'stop'")
        return self
