"""The recipe: everything that decides a run's result, typed, frozen and complete.

A section is a frozen pydantic model that refuses unknown keys and silent conversions. Sections whose keys belong to a
model or a method (``model``, ``algorithm``) keep them as given here; its own typed class checks them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator


class Section(BaseModel):
    """Base of all recipe sections: frozen, no unknown key, no conversion between types, finite numbers only."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Model(Section):
    """The model: one of ours by `name` with its own keys, or the user's by `factory` and `args`.

    `init` names a safetensors file with its first parameters.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)
    name: str | None = None
    factory: str | None = Field(None, pattern=r"^[\w.]+:\w+$")
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
    """The federated method, by name, and its parameters."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)
    name: str

    @property
    def parameters(self) -> dict[str, Any]:
        """The keys that belong to the method."""
        return dict(self.model_extra or {})


class Loss(Section):
    """The loss of one sample (``auto`` is the task's own), and how a minibatch combines its samples."""

    name: Literal["auto", "cross-entropy", "squared"] = "auto"
    reduction: Literal["mean", "sum"] = "mean"


class Seeds(Section):
    """One seed per purpose, so that one can be varied while the others stay."""

    model: int = Field(default=0, ge=0, lt=2**63)
    cohort: int = Field(0, ge=0, lt=2**63)
    batches: int = Field(0, ge=0, lt=2**63)


def _seed_for_all(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return {"model": value, "cohort": value, "batches": value}
    return value


class Cohort(Section):
    """Which clients take part in a round: `size` or `fraction` of them, or a `schedule`; all when none is given."""

    size: int | None = Field(None, ge=1)
    fraction: float | None = Field(None, gt=0, le=1)
    sampling: Literal["uniform", "bernoulli"] = "uniform"
    schedule: Path | None = None

    @model_validator(mode="after")
    def _one_rule(self) -> Cohort:
        if sum(rule is not None for rule in (self.size, self.fraction, self.schedule)) > 1:
            raise ValueError("one of 'size', 'fraction' and 'schedule'")
        if self.schedule is not None and self.sampling != "uniform":
            raise ValueError("no 'sampling' beside 'schedule'")
        return self


def _batch_size(value: Any) -> Any:
    if value == "full" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError("a whole number of at least 1, or 'full'")


class Local(Section):
    """The work of one client in one round."""

    steps: int | None = Field(None, ge=1)
    epochs: int | None = Field(None, ge=1)
    batch_size: Annotated[int | Literal["full"], PlainValidator(_batch_size)] = 50
    lr: float = Field(0.1, gt=0)
    lr_decay: float = Field(1.0, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    clip_norm: float | None = Field(None, gt=0)
    clip: Literal["all", "linear"] = "all"
    optimizer: Literal["sgd"] = "sgd"
    engine: Literal["auto", "sequential"] = "auto"

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Local:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("'steps' or 'epochs', not both")
        return self


class Budget(Section):
    """How many local steps τ_i each client can afford: drawn from {low..high} per client and round, or a schedule."""

    low: int | None = Field(None, ge=1)
    high: int | None = Field(None, ge=1)
    schedule: Path | None = None

    @model_validator(mode="after")
    def _range_or_schedule(self) -> Budget:
        if (self.schedule is None) != (self.low is not None and self.high is not None):
            raise ValueError("either 'low' and 'high', or 'schedule'")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError("'low' no larger than 'high'")
        return self


class Periodic(Section):
    """Something done every so many rounds; 0 means never."""

    every: int = Field(0, ge=0)


class Evaluate(Section):
    """When to measure test (and, if asked, training) loss and accuracy, and of which model."""

    every: int = Field(1, ge=0)
    model: Literal["last", "last-two", "cohort-average", "client-average"] = "last"
    train: Periodic = Periodic()
    batch_size: int = Field(1000, ge=1)


class Recipe(Section):
    """A whole run. Field by field as in the README's recipe page; see the sections' own docstrings."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$")
    seed: Annotated[Seeds, BeforeValidator(_seed_for_all)] = Seeds()
    data: Path
    data_content: str | None = None
    model: Model
    loss: Loss = Loss()
    dtype: Literal["float32", "float64"] = "float32"
    precision: Literal["float32"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(1, ge=1)
    rounds: int = Field(ge=1)
    cohort: Cohort = Cohort()
    weights: Literal["samples", "uniform"] | None = None
    local: Local
    budget: Budget | None = None
    guess: Literal["none"] = "none"
    algorithm: Algorithm
    evaluate: Evaluate = Evaluate()
    reduction: Literal["exact"] = "exact"
    placement: Literal["auto", "static", "balanced"] = "auto"
    python_path: list[Path] = Field(default_factory=list)
    output: Path

    @model_validator(mode="after")
    def _work_is_given(self) -> Recipe:
        if self.local.steps is None and self.local.epochs is None and self.budget is None:
            raise ValueError("'local.steps', 'local.epochs' or 'budget'")
        if self.local.epochs is not None and self.budget is not None:
            raise ValueError("'local.steps' instead of 'local.epochs' beside 'budget'")
        return self
