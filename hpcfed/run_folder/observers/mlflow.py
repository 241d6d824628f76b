"""The round's numbers for MLflow: in the run folder's ``logs/mlflow.db``, or at the tracking server of one's own."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from hpcfed.errors import InputError
from hpcfed.run_folder.observers import Started
from hpcfed.run_folder.observers._scalars import scalars

URI, FOLDER = "MLFLOW_TRACKING_URI", "hpcfed.folder"
LONGEST, AT_ONCE = 6000, 100
"""Characters of a parameter, and parameters of a request, that MLflow takes."""
ENDINGS = {"finished": "FINISHED", "stopped": "KILLED"}


class MLflow:
    """Logs each number of a row by round, and the recipe's keys as parameters.

    Args:
        args: ``tracking_uri`` (default: ``MLFLOW_TRACKING_URI``, else the run folder's database), ``experiment_name``
            (``hpcfed``), and what ``MlflowClient.create_run`` takes, such as ``tags``.

    Raises:
        InputError: MLflow has no SQLAlchemy (``mlflow-skinny``), which the database needs.
    """

    def __init__(self, args: Mapping[str, Any]):
        self._args = dict(args)
        self._uri = self._args.pop("tracking_uri", None) or os.environ.get(URI)
        self._experiment = self._args.pop("experiment_name", "hpcfed")
        if self._uri is None and importlib.util.find_spec("sqlalchemy") is None:
            remedy = "pip install mlflow, or name a server (args: {tracking_uri: …})"
            raise InputError("observers: mlflow without sqlalchemy, which is not installed", remedy=remedy)

    def start(self, run: Started) -> None:
        """Begin an MLflow run, or go on with the one of this folder."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # else it calls its makers
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # tells of each table that it makes
        folder = run.folder.absolute() / "logs"
        folder.mkdir(exist_ok=True)
        self._client = client = MlflowClient(tracking_uri=self._uri or f"sqlite:///{folder / 'mlflow.db'}")
        artifacts = {} if self._uri else {"artifact_location": (folder / "mlflow").as_uri()}
        known = client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known else client.create_experiment(self._experiment, **artifacts)
        named = {FOLDER: hashlib.sha256(str(run.folder.absolute()).encode()).hexdigest()[:16]}
        condition = f"tags.`{FOLDER}` = '{named[FOLDER]}'"
        before = client.search_runs([experiment], condition) if run.done else []
        if before:
            self._id = before[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            return
        own = {"run_name": run.name, **self._args, "tags": named | self._args.get("tags", {})}
        self._id = client.create_run(experiment, **own).info.run_id
        parameters = [Param(key, value[:LONGEST]) for key, value in _leaves(run.recipe)]
        for first in range(0, len(parameters), AT_ONCE):
            client.log_batch(self._id, params=parameters[first : first + AT_ONCE])

    def round(self, row: Mapping[str, Any]) -> None:
        """Log a round's numbers."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(
            self._id, metrics=[Metric(name, value, now, row["round"]) for name, value in scalars(row)]
        )

    def end(self, status: str) -> None:
        """Record how the run ended."""
        self._client.set_tag(self._id, "hpcfed.status", status)
        self._client.set_terminated(self._id, ENDINGS.get(status, "FAILED"))


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the recipe's dotted keys that have a value, and the value as text."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", str(value)


observer = MLflow
