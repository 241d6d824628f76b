"""Writing of a run's record: a JSON object a round, per-client scores, and models."""

from __future__ import annotations

import csv
import io
import math
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, BinaryIO, cast

import torch
from safetensors.torch import save

from hpcfed.client.averaged_buffers import AveragedBuffers
from hpcfed.errors import EnvironmentFailure
from hpcfed.evaluation.measures import Value
from hpcfed.evaluation.per_client import ClientScores
from hpcfed.models.flat import FlatModel
from hpcfed.parts import Parts
from hpcfed.run_folder.files import CLIENTS, INITIAL, private_file
from hpcfed.run_folder.folder import RunFolder
from hpcfed.run_folder.rounds import line_of
from hpcfed.run_folder.update_hashes import KIND as UPDATE_HASH
from hpcfed.simulation import RoundResult
from hpcfed.types import DELTA, State

CHECK_SECONDS = 1.0
"""The record is looked for on the disk no more often: a look takes as long as a hundredth of a small round."""


class Recorder:
    """Writes ``metrics.jsonl`` on rank 0, a line a round, and ``clients.csv``; on other ranks it writes nothing.

    ``params_up`` and ``params_down`` count shared parameters as the papers do. ``bytes_up`` and ``bytes_down`` are of
    what is sent: parameters × bytes of the run's dtype × vectors of the round, 8 bytes for each reported scalar, and
    averaged buffers once in each direction.
    ``gradients`` counts minibatch steps: one with SAM's radius, or of the user's own, counts once.

    Args:
        folder: the run folder.
        parts: the simulation's, for its method, model and world.
        totals: of the rounds done before, if the run goes on from a checkpoint.
    """

    def __init__(self, folder: RunFolder, parts: Parts, totals: Mapping[str, int]):
        local, size = parts.method.local, parts.model.num_parameters
        self._up, self._down = local.sent * size, local.received * size
        self._vector_bytes, self._scalar_bytes = size * parts.model.vector.element_size(), 8 * len(local.scalars)
        self._received = local.received
        self._buffer_bytes = AveragedBuffers(parts.model).sent_bytes
        counted = ("params_up", "params_down", "bytes_up", "bytes_down", "gradients")
        self.totals = {**dict.fromkeys(counted, 0), **totals}
        self._folder = folder
        mode = "ab" if totals else "wb"
        self._file: BinaryIO | None = None
        self._hashes: BinaryIO | None = None
        parts.world.together(lambda: self._open(mode, hashed=parts.hashes_updates) if parts.world.is_root else None)
        self._size = self._file.seek(0, os.SEEK_END) if self._file is not None else 0
        self._checked = -math.inf

    def _open(self, mode: str, *, hashed: bool) -> None:
        try:
            self._file = cast(BinaryIO, self._folder.metrics.open(mode))
            self._hashes = cast(BinaryIO, self._folder.update_hashes.open(mode)) if hashed else None
        except OSError as error:
            raise EnvironmentFailure("cannot be written", where=str(self._folder.path), got=str(error)) from error

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in (self._file, self._hashes):
            if file is not None:
                with suppress(OSError):  # `add` has reported what could not be written
                    file.close()

    def add(
        self,
        round: int,
        result: RoundResult,
        scores: Mapping[str, Value],
        clients: ClientScores | None,
        seconds: Mapping[str, float],
    ) -> dict[str, Any]:
        """Write one round, and return its row of ``metrics.jsonl``; `scores` are columns of it.

        Raises:
            EnvironmentFailure: the disk refuses.
        """
        size = len(result.cohort.clients)
        self.totals["params_up"] += size * self._up
        self.totals["params_down"] += size * self._down
        sent = len(result.vectors) * self._vector_bytes + self._scalar_bytes + self._buffer_bytes
        self.totals["bytes_up"] += size * sent
        self.totals["bytes_down"] += size * (self._received * self._vector_bytes + self._buffer_bytes)
        self.totals["gradients"] += result.gradients
        has_delta = DELTA in result.vectors
        row = {
            "round": round,
            "cohort": result.cohort.clients.tolist(),
            "local_loss": result.local_loss,
            **scores,
            "clients": None if clients is None else clients.summary(),
            **({} if result.never_drawn is None else {"never_drawn": result.never_drawn}),
            "skipped": result.skipped,
            "attempts": result.attempts,
            "unit": result.units,
            "server_lr": result.server_lr,
            **({"method": dict(result.metrics)} if result.metrics else {}),
            "delta_sq": result.means.delta_sq if has_delta else None,
            "mean_delta_sq": result.means.mean_delta_sq if has_delta else None,
            **self.totals,
            "hash": result.hash,
            "seconds": {name: _round_off(value) for name, value in {**result.seconds, **seconds}.items()},
            "imbalance": _round_off(result.imbalance),
        }
        if self._file is not None:
            if time.monotonic() - self._checked >= CHECK_SECONDS:
                self._check(self._file)
            try:
                if self._hashes is not None and result.update_hashes is not None:
                    self._hashes.write(result.update_hashes.astype(UPDATE_HASH).tobytes())
                    self._hashes.flush()
                self._size += self._file.write(line_of(row).encode())
                self._file.flush()
                if clients is not None:
                    self._add_clients(round, clients)
                self._folder.code.add()
            except OSError as error:
                raise EnvironmentFailure("cannot be written", where=str(self._folder.path), got=str(error)) from error
        return row

    def _check(self, file: BinaryIO) -> None:
        """Check that no other program has changed the record: else further rounds would be trained in vain.

        Raises:
            EnvironmentFailure: another program removed, replaced or changed it.
        """
        try:
            found = self._folder.metrics.stat()
            is_ours = os.path.samestat(found, os.fstat(file.fileno())) and found.st_size == self._size
        except OSError:
            is_ours = False
        if not is_ours:
            what, remedy = "the record was removed or changed while the run wrote it", "choose another output"
            raise EnvironmentFailure(what, where=str(self._folder.metrics), remedy=remedy)
        self._checked = time.monotonic()

    def _add_clients(self, round: int, clients: ClientScores) -> None:
        """Append the rows of a round; other columns than before, where the recipe's metrics changed, join the old."""
        header = ",".join(clients.columns)
        with self._folder.clients.open("a+", encoding="utf-8", newline="") as table:
            table.seek(0)
            found = table.readline().rstrip("\n")
            if found in ("", header):
                write_rows(table, [] if found else [clients.columns], clients.rows(round))
                return
        self._join(found.split(","), round, clients)

    def _join(self, before: list[str], round: int, clients: ClientScores) -> None:
        """Write the table anew with the columns of its old rows and of a round's."""
        columns = list(dict.fromkeys([*before, *clients.columns]))
        with self._folder.clients.open(encoding="utf-8", newline="") as table:
            old = [[row.get(name) or "" for name in columns] for row in csv.DictReader(table)]
        now = (dict(zip(clients.columns, row, strict=True)) for row in clients.rows(round))
        text = io.StringIO(newline="")
        write_rows(text, [columns, *old], ([row.get(name, "") for name in columns] for row in now))
        self._folder.write(CLIENTS, text.getvalue())

    def keep_models(self, model: FlatModel, w: torch.Tensor, evaluated: torch.Tensor, averaged: State) -> None:
        """Write ``model.safetensors``, the last iterate (d,), and the evaluated model (d,), with its averaged buffers,
        if it differs.
        """
        if self._file is None:
            return
        self._check(self._file)
        self._folder.write("model.safetensors", save(model.named(w)))
        if not torch.equal(w, evaluated) or averaged is not model.averaged:
            self._folder.write("model-evaluated.safetensors", save(model.named(evaluated, averaged)))

    def keep_private(self, parts: Parts) -> None:
        """Write the private parts of clients at home on this rank, and on rank 0 the initial one, to ``private/``.

        Raises:
            EnvironmentFailure: the disk refuses.
        """
        model = parts.model
        if not model.own:
            return
        if parts.world.is_root:
            self._folder.write(INITIAL, save(model.named_private(model.own)))
        for client in parts.clients:
            self._folder.write(private_file(client), save(model.named_private(parts.private.of(client))))


def write_rows(file: IO[str], *rows: Iterable[Iterable[Any]]) -> None:
    """Write rows of a table as CSV."""
    writer = csv.writer(file, lineterminator="\n")
    for some in rows:
        writer.writerows(some)


def _round_off(value: float) -> float:
    """Round a measured number to six digits after the point: microseconds."""
    return float(f"{value:.6f}")
