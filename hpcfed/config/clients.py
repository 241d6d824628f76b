"""Sections of the recipe on clients one by one: evaluation on their own samples, and rounds without some of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from hpcfed.config.limits import MAX_COUNT, Count, Period, Section, a_batch_size

BatchSize = Annotated[
    int | Literal["full"],
    PlainValidator(a_batch_size),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_COUNT}, {"const": "full"}]}),
]


class FineTune(Section):
    """A few steps of plain SGD from the global model, on a client's training samples."""

    steps: Count = 5
    """Number of steps."""
    lr: float = Field(gt=0)
    """Step size."""
    batch_size: BatchSize = 50
    """Samples of a minibatch; `full`: all."""


class EvaluateClients(Section):
    """Models to evaluate on each client's own samples, and how often; one row a client in ``clients.csv``.

    `models`: ``global``, the model that ``evaluate.model`` names; ``last``, each client's own last model (the initial
    one until it takes part); ``fine-tuned``, the global one after the steps of `fine_tune`; ``personal``, the
    client's own of a method that trains one, such as Ditto.
    """

    every: Period = 0
    """In rounds; 0: never."""
    models: list[Literal["global", "last", "fine-tuned", "personal"]] = Field(["global"], min_length=1)
    """`global`; `last`: clients' last models (with `model: client-average`); `fine-tuned`: the global one after
    `fine_tune`; `personal`: clients' own models (of `ditto`)."""
    fine_tune: FineTune | None = None
    """Steps of SGD on a client's training samples."""

    @model_validator(mode="after")
    def _parts_fit(self) -> EvaluateClients:
        if len(set(self.models)) < len(self.models):
            raise ValueError("different 'models'")
        if ("fine-tuned" in self.models) != (self.fine_tune is not None):
            raise ValueError("'fine_tune' beside 'fine-tuned' in 'models', and only there")
        return self


class Without(Section):
    """Clients that never take part, as if they had not joined the federation: all else stays as it is.

    The others keep their numbers, the initial model and their random streams; q_i, n and N are those of the others.

    `clients` are numbers or names. `cohorts: empty` draws among all clients and leaves the places of these empty (a
    round without any member leaves the model as it is); ``redrawn`` draws among the others. `evaluate: others` counts
    the data of the others, and reports the test sets of these clients apart, as ``apart``; ``all`` evaluates on all
    clients, so that runs with and without are measured on the same data and by the same class weights of the loss.
    """

    clients: list[int | str] = Field(min_length=1)
    """Which, by number or name."""
    cohorts: Literal["empty", "redrawn"] = "empty"
    """`empty` leaves their places in the cohorts empty; `redrawn` draws among the others."""
    evaluate: Literal["others", "all"] = "others"
    """`others` measures on the others' data, and theirs apart; `all` on all clients' data."""

    @property
    def numbers(self) -> list[int]:
        """The clients of a resolved recipe."""
        return [client for client in self.clients if isinstance(client, int)]


def a_client_or_several(value: Any) -> Any:
    """Return the section from its short form, a client or a list of them."""
    if isinstance(value, int | str) and not isinstance(value, bool):
        return {"clients": [value]}
    return {"clients": value} if isinstance(value, list) else value
