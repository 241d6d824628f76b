"""Writes a run's results: a JSON object for each round, per-client scores, update hashes, and models."""

from __future__ import annotations

import csv
import io
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors.torch import save

from hpcfed.client.averaged_buffers import AveragedBuffers
from hpcfed.config.recipe import Recipe
from hpcfed.evaluation.measures import Value
from hpcfed.evaluation.per_client import ClientScores
from hpcfed.io.atomic import writing
from hpcfed.models.flat import FlatModel
from hpcfed.parts import Parts
from hpcfed.run_folder.appended import AppendedFile
from hpcfed.run_folder.cut import MODELS
from hpcfed.run_folder.files import CLIENTS, INITIAL, private_file
from hpcfed.run_folder.folder import RunFolder
from hpcfed.run_folder.private import promised
from hpcfed.run_folder.rounds import iterate_rounds, line_of, skipped_in, skipped_in_words
from hpcfed.run_folder.update_hashes import KIND as UPDATE_HASH
from hpcfed.simulation import RoundResult
from hpcfed.types import DELTA, MOVED, PERSONAL, State
from hpcfed.updates._layout import layout_of

CHECK_SECONDS = 1.0
"""Least seconds between two checks of the files on disk; a check takes as long as a hundredth of a small round."""


class MetricsRows:
    """Makes the rows of ``metrics.jsonl``, with running totals of what was sent and computed.

    ``params_up`` and ``params_down`` count shared parameters as the papers do. ``bytes_up`` and ``bytes_down`` count
    what is sent: parameters × bytes of the run's dtype × vectors of the round, 8 bytes for each reported scalar, and
    averaged buffers once in each direction. A vector that ``updates`` compresses, and a model that ``down`` compresses,
    count with their compressed size; with ``secure_aggregation`` a vector counts as masked words of 8 bytes. Vectors
    that a method compresses by itself, or sends down besides the model, count in full. The sum for ``evaluate.model:
    client-average`` does not count, since it follows from Δ. A private run's counts are those of the expected cohort.

    ``gradients`` counts minibatch steps (one of SAM, or of the user's code, is one); not counted in a private run.

    Args:
        parts: the simulation's parts.
        totals: running totals of the rounds done before.
        suspected: whether the sentinel has found an update that differs.
    """

    def __init__(self, parts: Parts, totals: Mapping[str, int], *, suspected: bool = False):
        self._suspected = suspected
        local, size = parts.method.local, parts.model.num_parameters
        self._up, self._down = local.sent * size, local.received * size
        self._vector_bytes, self._scalar_bytes = size * parts.model.vector.element_size(), 8 * len(local.scalars)
        self._received = local.received
        packed = layout_of(parts.model).sizes, 8 * parts.model.vector.element_size()
        self._sent_bytes = parts.chain.codings(*packed)[-1].num_bytes
        self._spared = self._vector_bytes - parts.chain.codings_down(*packed)[-1].num_bytes if local.received else 0
        self._masks, self._words = parts.masks, parts.model.num_parameters
        self._buffer_bytes = AveragedBuffers(parts.model).sent_bytes
        self._privacy = parts.chain.privacy
        self._epsilon = promised(parts)[1]
        counted = ("params_up", "params_down", "bytes_up", "bytes_down", "gradients")
        self.totals = {**dict.fromkeys(counted, 0), **totals}

    @property
    def counts(self) -> Mapping[str, int | None]:
        """The running totals as a row has them: of a private run without ``gradients``."""
        return self.totals if self._privacy is None else {**self.totals, "gradients": None}

    def row(
        self,
        round: int,
        result: RoundResult,
        scores: Mapping[str, Value],
        clients: ClientScores | None,
        seconds: Mapping[str, float],
    ) -> dict[str, Any]:
        """Add a round to the totals; return its row, in which `scores` are columns."""
        size = len(result.cohort.clients) if self._privacy is None else int(self._privacy.expected + 0.5)
        self.totals["params_up"] += size * self._up
        self.totals["params_down"] += size * self._down
        num_sent = sum(name != MOVED for name in result.vectors)
        sent = num_sent * self._sent_bytes + self._scalar_bytes + self._buffer_bytes
        received = size * (self._received * self._vector_bytes - self._spared + self._buffer_bytes)
        if self._masks is None:
            self.totals["bytes_up"] += size * sent
        else:
            left = result.num_sent
            if self._privacy is not None:  # the row withholds who was left
                left = int(size * (1 - self._masks.dropout) + 0.5)
            is_opened = self._privacy is not None or len(result.skipped) < size
            self.totals["bytes_up"] += self._masks.bytes_up(size, left, num_sent * self._words, is_opened=is_opened)
            received += self._masks.bytes_down(size)
        self.totals["bytes_down"] += received
        self.totals["gradients"] += result.gradients if self._privacy is None else 0
        has_delta = DELTA in result.vectors and not math.isnan(result.means.delta_sq)  # NaN: of a round without means
        self._suspected |= bool(result.suspicions)
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
            **self.counts,
            "hash": result.hash,
            **({"bitwise": False} if self._suspected else {}),
            **({"sentinel": [asdict(each) for each in result.suspicions]} if result.suspicions else {}),
            "seconds": {name: _round_off(value) for name, value in {**result.seconds, **seconds}.items()},
            "imbalance": _round_off(result.imbalance),
        }
        return row if self._epsilon is None else self._without_secrets(row, self._epsilon(round))

    def _without_secrets(self, row: Mapping[str, Any], epsilon: float) -> dict[str, Any]:
        """Return the row of a private run: with its ε, and without values that no noise protects (`WITHHELD`)."""
        if self._privacy is None:
            return {**row, "local_loss": None, "epsilon": epsilon}
        nothing = dict.fromkeys(("local_loss", "mean_delta_sq", "imbalance"))
        total = {"total": row["seconds"]["total"]} if "total" in row["seconds"] else {}
        return {**row, **nothing, "cohort": [], "skipped": [], "epsilon": epsilon, "seconds": total}


class Recorder:
    """Writes ``metrics.jsonl``, ``clients.csv`` and ``update-hashes.bin`` on rank 0; nothing on other ranks.

    Args:
        folder: the run folder.
        parts: the simulation's parts.
        totals: running totals of the rounds done before, if the run continues from a checkpoint.
        suspected: whether the sentinel has found an update that differs.
    """

    def __init__(self, folder: RunFolder, parts: Parts, totals: Mapping[str, int], *, suspected: bool = False):
        self._row = MetricsRows(parts, totals, suspected=suspected)
        self._folder, self._writes = folder, parts.world.is_root
        self._rounds, self._hashes, self._clients = (
            AppendedFile(path) for path in (folder.metrics, folder.update_hashes, folder.clients)
        )
        self._columns: list[str] = []
        parts.world.together(lambda: self._open(hashed=parts.hashes_updates) if self._writes else None)
        self._checked = -math.inf

    @property
    def totals(self) -> dict[str, int]:
        """Running totals of what was sent and computed, by column."""
        return self._row.totals

    def _open(self, *, hashed: bool) -> None:
        with writing(self._folder.path):
            self._rounds.open()
            if hashed:
                self._hashes.open()
            if self._clients.path.exists():  # else its first rows create it
                self._clients.open()
                with self._clients.path.open(encoding="utf-8") as table:
                    header = table.readline().rstrip("\n")
                self._columns = header.split(",") if header else []

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in (self._rounds, self._hashes, self._clients):
            file.close()

    def add(
        self,
        round: int,
        result: RoundResult,
        scores: Mapping[str, Value],
        clients: ClientScores | None,
        seconds: Mapping[str, float],
    ) -> dict[str, Any]:
        """Write one round; return its row of ``metrics.jsonl``, in which `scores` are columns.

        Raises:
            EnvironmentFailure: a file cannot be written, or another program changed it.
        """
        row = self._row.row(round, result, scores, clients, seconds)
        if self._writes:
            if time.monotonic() - self._checked >= CHECK_SECONDS:
                self._check()
            with writing(self._folder.path):
                if self._hashes.is_open and result.update_hashes is not None:
                    self._hashes.write(result.update_hashes.astype(UPDATE_HASH).tobytes())
                    self._hashes.flush()
                self._rounds.write(line_of(row))
                self._rounds.flush()
                if clients is not None:
                    self._add_clients(round, clients)
                self._folder.code.add()
        return row

    def remark(self, recipe: Recipe) -> str:
        """Return in words which updates were left out of the rounds; "" if none was. On rank 0."""
        masked, skips = recipe.secure_aggregation is not None, recipe.on_bad_client == "skip"
        if not masked and not skips:
            return ""
        rows = [skipped_in(row) for row in iterate_rounds(self._folder.metrics)]
        skipped = Counter(client for clients in rows for client in clients)
        return skipped_in_words(skipped, len(rows), masked=masked, skips=skips) if skipped else ""

    def _check(self) -> None:
        for file in (self._rounds, self._hashes, self._clients):
            file.check()
        self._checked = time.monotonic()

    def _add_clients(self, round: int, clients: ClientScores) -> None:
        """Append a round's rows to ``clients.csv``; rewrite the table if metrics, and so columns, changed."""
        columns = list(clients.columns)
        if self._columns not in ([], columns):
            self._join(round, clients)
            return
        if not self._clients.is_open:
            self._clients.open()
        write_rows(self._clients, [] if self._columns else [columns], clients.rows(round))
        self._clients.flush()
        self._columns = columns

    def _join(self, round: int, clients: ClientScores) -> None:
        """Rewrite ``clients.csv`` with a round's rows added, and with the columns of both the old and the new rows."""
        columns = list(dict.fromkeys([*self._columns, *clients.columns]))
        with self._clients.path.open(encoding="utf-8", newline="") as table:
            old = [[row.get(name) or "" for name in columns] for row in csv.DictReader(table)]
        now = (dict(zip(clients.columns, row, strict=True)) for row in clients.rows(round))
        text = io.StringIO(newline="")
        write_rows(text, [columns, *old], ([row.get(name, "") for name in columns] for row in now))
        self._clients.close()
        self._folder.write(CLIENTS, text.getvalue())
        self._clients.open()
        self._columns = columns

    def keep_models(self, model: FlatModel, w: torch.Tensor, evaluated: torch.Tensor, averaged: State) -> None:
        """Write the files of the last iterate `w`, (d,), and, if it differs, of the evaluated model, (d,); on rank 0.

        `averaged`: averaged buffers of the evaluated model.
        """
        if not self._writes:
            return
        self._check()
        for name, content in models_of(model, w, evaluated, averaged).items():
            self._folder.write(name, content)

    def keep_private(self, parts: Parts) -> None:
        """Write this rank's files in ``private/`` (`private_files_of`).

        Raises:
            EnvironmentFailure: a file cannot be written.
        """
        for name, content in private_files_of(parts):
            self._folder.write(name, content)


def models_of(model: FlatModel, w: torch.Tensor, evaluated: torch.Tensor, averaged: State) -> Mapping[str, bytes]:
    """Return file name → content for the last iterate `w`, (d,), and for the evaluated model, (d,), if it differs."""
    files = {MODELS[0]: save(model.named(w))}
    if not torch.equal(w, evaluated) or averaged is not model.averaged:
        files[MODELS[1]] = save(model.named(evaluated, averaged))
    return files


def private_files_of(parts: Parts) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the files of private parts and personal models of this rank's clients.

    Rank 0 also yields the initial private part. Personal models of a run with differential privacy are left out, since
    no noise protects them.
    """
    model = parts.model
    personal = parts.trains_personal and parts.chain.privacy is None and parts.sample_noise is None
    if model.own and parts.world.is_root:
        yield INITIAL, save(model.named_private(model.own))
    for client in parts.clients if model.own or personal else ():
        state = parts.clients.get(client) or {}
        own = parts.private.of(client) if model.own else {}
        yield private_file(client), save(model.named_private(own, state.get(PERSONAL) if personal else None))


class _Text(Protocol):
    """An object that text can be written to, such as a file."""

    def write(self, text: str, /) -> object: ...


def write_rows(file: _Text, *rows: Iterable[Iterable[Any]]) -> None:
    """Write rows of a table as CSV."""
    writer = csv.writer(file, lineterminator="\n")
    for some in rows:
        writer.writerows(some)


def _round_off(value: float) -> float:
    """Round a measured number to six digits after the point: microseconds."""
    return float(f"{value:.6f}")
