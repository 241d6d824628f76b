"""The recipe's section ``evaluate.clients``: evaluation on each client's own samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from hpcfed.config.limits import MOST, Count, Period, Section, a_batch_size

BatchSize = Annotated[
    int | Literal["full"],
    PlainValidator(a_batch_size),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1, "maximum": MOST}, {"const": "full"}]}),
]


class FineTune(Section):
    """A few steps of plain SGD from the global model, on a client's training samples."""

    steps: Count = 5
    lr: float = Field(gt=0)
    batch_size: BatchSize = 50


class EvaluateClients(Section):
    """Models to evaluate on each client's own samples, and how often; one row a client in ``clients.csv``.

    `models`: ``global``, the model that ``evaluate.model`` names; ``last``, each client's own last model (the initial
    one until it takes part); ``fine-tuned``, the global one after the steps of `fine_tune`.
    """

    every: Period = 0
    models: list[Literal["global", "last", "fine-tuned"]] = Field(["global"], min_length=1)
    fine_tune: FineTune | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> EvaluateClients:
        if len(set(self.models)) < len(self.models):
            raise ValueError("different 'models'")
        if ("fine-tuned" in self.models) != (self.fine_tune is not None):
            raise ValueError("'fine_tune' beside 'fine-tuned' in 'models', and only there")
        return self
