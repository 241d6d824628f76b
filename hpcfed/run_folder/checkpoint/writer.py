"""Writing of checkpoints on a background thread, while the next rounds train.

States are never changed in place, so a snapshot is references; the thread turns them into bytes. Each rank writes the
clients at home on it. A later round's reduction carries how far each rank is; once all are done, a second thread of
rank 0 waits for the disk, renames the files and writes the manifest. Of the evenly spaced states several may await it:
a run of a second does not wait twenty times for a disk.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from hpcfed.client.state_store import ClientStates
from hpcfed.config.limits import Checkpoint, next_kept, stretch_of
from hpcfed.errors import EnvironmentFailure
from hpcfed.io.atomic import to_disk, write_whole
from hpcfed.ranks.threads import start
from hpcfed.ranks.world import World
from hpcfed.run_folder.checkpoint.layout import NO_FILE_ERRORS, SUFFIXES, Manifest, Progress, RecordLayout, stem
from hpcfed.run_folder.files import HALF_STATES, STATES
from hpcfed.run_folder.folder import RunFolder
from hpcfed.types import State

log = logging.getLogger("hpcfed")

PIECE, BUFFERED = 1 << 16, 1 << 20
"""Bytes per read when a file is hashed, and per write of small records."""


@dataclass(frozen=True)
class Snapshot:
    """A simulation after a round: references only.

    Attributes:
        round: the round after which it is taken.
        replicated: vectors and scalars that are the same on all ranks.
        touched: numbers of all clients that have a state, (n,) int64, ordered by the rank they are placed on, then by
            number.
        sections: number of these clients on each rank, (P,).
        clients: client number → state, of the clients placed on this rank.
        progress: the round loop's state, except for tensors, as plain JSON; the same on all ranks.
        is_between: whether it is only one of the evenly spaced states, not due by ``checkpoint.every``.
    """

    round: int
    replicated: Mapping[str, Tensor]
    touched: np.ndarray
    sections: Sequence[int]
    clients: Mapping[int, State]
    progress: Mapping[str, Any]
    is_between: bool = False


class CheckpointWriter:
    """Writes one checkpoint at a time into a run folder.

    Args:
        folder: ``checkpoints/`` of the run folder.
        recipe: digest of the recipe.
        keep: which checkpoints stay.
        layout: of the clients' records.
        states: the store that keeps a snapshot's states while it is written.
        initial: returns the state of a client that has taken part, but has kept the one that it began with.
        session: a name unique to this job in this folder.
        world: the ranks.
    """

    def __init__(
        self,
        folder: Path,
        recipe: str,
        keep: Retention,
        layout: RecordLayout,
        states: ClientStates,
        initial: Callable[[], State],
        session: str,
        world: World,
    ):
        self._folder, self._recipe, self._keep, self._layout = folder, recipe, keep, layout
        self._states, self._initial, self._session, self._world = states, initial, session, world
        self._thread: threading.Thread | None = None
        self._pending: Manifest | None = None
        self._failure: EnvironmentFailure | None = None
        self._done = 0
        self._lock, self._unsettled = threading.Lock(), list[Manifest]()
        self._settling: threading.Thread | None = None
        self._written_in = self._settled_in = 0.0

    @property
    def written(self) -> int:
        """Round of the last checkpoint whose part of this rank is written; 0 if there is none."""
        return self._done

    @property
    def failure(self) -> EnvironmentFailure | None:
        """The error that kept this rank's part from being written; None if there was none."""
        return self._failure

    def raise_failure(self) -> None:
        """Raise this rank's error, if there is one."""
        if self._failure is not None:
            raise self._failure

    @property
    def seconds(self) -> float:
        """Seconds of the last checkpoint: of this rank's part and, on rank 0, until it was valid."""
        return self._written_in + self._settled_in

    def start(self, snapshot: Snapshot) -> None:
        """Begin to write a snapshot; `wait` must have returned for the snapshot before."""
        self._pending = None
        if not snapshot.is_between:
            self.wait_for_validity()
        self._thread = start(threading.Thread(target=self._write, args=(snapshot,), name="checkpoint", daemon=True))

    def wait(self) -> None:
        """Wait until this rank's part is on disk, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._states.end_snapshot()

    def awaits(self, written_everywhere: int) -> bool:
        """Whether this rank is rank 0 and has to make valid the checkpoint that all ranks have written."""
        return self._pending is not None and self._pending.round == written_everywhere

    def settle(self, run: RunFolder) -> None:
        """Begin to make the checkpoint valid, on a thread. An OSError becomes the `failure`.

        Rename its files, write the manifest, remove the oldest checkpoint; all of it on disk in this order, after the
        rounds of the run's record.
        """
        manifest, self._pending = self._pending, None
        if manifest is None:
            return
        with self._lock:
            self._unsettled.append(manifest)
            if self._settling is None:
                settling = threading.Thread(target=self._settle_all, args=(run,), name="validity", daemon=True)
                self._settling = start(settling)

    def wait_for_validity(self) -> None:
        """Wait until each checkpoint that `settle` has begun with is valid, or has failed."""
        settling = self._settling
        if settling is not None:
            settling.join()

    def close(self) -> None:
        """Wait for both threads."""
        self.wait()
        self.wait_for_validity()

    def _settle_all(self, run: RunFolder) -> None:
        while found := self._to_settle():
            started = time.perf_counter()
            try:
                self._make_valid(run, found)
            except Exception as error:  # an exception that ends a thread is lost otherwise
                log.error("the checkpoint of round %d cannot be written", found[-1].round, exc_info=error)
                self._failure = self._refused(found[-1].round, error)
            self._settled_in = time.perf_counter() - started

    def _to_settle(self) -> list[Manifest]:
        """Return the checkpoints to be made valid; with the last one the thread ends."""
        with self._lock:
            found, self._unsettled = self._unsettled, []
            if not found:
                self._settling = None
            return found

    def _make_valid(self, run: RunFolder, manifests: Sequence[Manifest]) -> None:
        run.to_disk()
        for manifest in manifests:
            to_disk(self._temporary(manifest.round, "server"))
            for suffix in ("server", "clients") if manifest.num_clients else ("server",):
                self._temporary(manifest.round, suffix).replace(self._folder / f"{stem(manifest.round)}.{suffix}")
            write_whole(self._folder / f"{stem(manifest.round)}.json", manifest.to_json())
        to_disk(self._folder)  # the names, before older ones go
        remove_all_but(self._folder, self._keep)

    def _write(self, snapshot: Snapshot) -> None:
        started = time.perf_counter()
        try:
            self._write_clients(snapshot)
            if self._world.is_root:
                digest, sha256 = self._write_server(snapshot)
                self._pending = Manifest(
                    round=snapshot.round, recipe=self._recipe, server_hash=digest, num_clients=len(snapshot.touched),
                    progress=Progress.model_validate(snapshot.progress), sha256=sha256, sections=[*snapshot.sections],
                )  # fmt: skip
        except Exception as error:  # an exception that ends a thread is lost otherwise
            log.error("the checkpoint of round %d cannot be written", snapshot.round, exc_info=error)
            self._failure = self._refused(snapshot.round, error)
            return
        self._written_in = time.perf_counter() - started
        self._done = snapshot.round

    def _write_clients(self, snapshot: Snapshot) -> None:
        """Write the records of this rank's clients."""
        first = sum(snapshot.sections[: self._world.rank])
        mine = snapshot.touched[first : first + snapshot.sections[self._world.rank]].tolist()
        if not mine:
            return
        path = self._temporary(snapshot.round, "clients")
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", BUFFERED) as file:
            file.seek(int(self._layout.offsets(snapshot.sections)[first]))
            for client in mine:
                state = snapshot.clients.get(client) or self._initial()
                self._layout.write(file, client, snapshot.round, state)
                self._states.release(client)
            file.flush()
            os.fsync(file)

    def _write_server(self, snapshot: Snapshot) -> tuple[str, str]:
        """Write the replicated tensors, straight from their memory, and return the file's XXH3-128 and SHA-256.

        safetensors leaves a temporary file of unknown name if it is killed, so it writes into a separate folder. It
        also makes the file unreadable to others, under any umask; a file created before shows the right mode.
        """
        path, folder = (self._temporary(snapshot.round, suffix) for suffix in ("server", "folder"))
        folder.mkdir()
        written = folder / "server"
        written.touch()
        allowed = stat.S_IMODE(written.stat().st_mode)
        save_file(_apart(snapshot.replicated), written)
        written.chmod(allowed)
        written.replace(path)
        folder.rmdir()
        digest, sha256 = xxhash.xxh3_128(), hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                digest.update(piece)
                sha256.update(piece)
        return digest.hexdigest(), sha256.hexdigest()

    def _temporary(self, round: int, suffix: str) -> Path:
        return self._folder / f".{stem(round)}.{self._session}.{suffix}"

    def _refused(self, round: int, error: Exception) -> EnvironmentFailure:
        is_gone = not self._folder.exists()
        what = "the folder was moved or removed: put it back" if is_gone else "free space there"
        failure = EnvironmentFailure(
            f"the checkpoint of round {round} cannot be written",
            where=str(self._folder),
            got=getattr(error, "strerror", None) or str(error),
            remedy=f"{what}; the run goes on from the checkpoint before",
        )
        failure.__cause__ = error
        return failure


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with copies of those that share memory, which safetensors refuses."""
    places = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
    return {
        name: tensor.clone() if places[tensor.untyped_storage().data_ptr()] > 1 else tensor.contiguous()
        for name, tensor in tensors.items()
    }


def manifests(folder: Path) -> list[Path]:
    """Return the paths of the manifests in a folder, newest first; [] if the folder does not exist.

    Raises:
        OSError: the folder cannot be read.
    """
    return sorted((path for path in _ours(folder) if path.name[0] != "." and path.suffix == ".json"), reverse=True)


def _ours(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if any(names.fullmatch(path.name) for names in (STATES, HALF_STATES))]
    except OSError as error:
        if error.errno in NO_FILE_ERRORS:
            return []
        raise


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay; see `hpcfed.config.limits.Checkpoint`.

    Attributes:
        section: the recipe's ``checkpoint``.
        states: evenly spaced ones over `rounds`, beside the newest.
        rounds: T.
    """

    section: Checkpoint
    states: int = 0
    rounds: int = 1

    def superfluous(self, newest_first: Sequence[int]) -> list[int]:
        """Return the rounds whose checkpoints are to be removed."""
        found, wanted, stretch = [], 0 if self.section.keep == "spaced" else None, 0
        for round in reversed(newest_first[self.section.newest_kept :]):
            stays = False
            if wanted is not None and round >= wanted:
                stays, wanted = True, next_kept(round)
            if self.states and stretch_of(round, self.rounds, self.states) > stretch:
                stays, stretch = True, stretch_of(round, self.rounds, self.states)
            if not stays:
                found.append(round)
        return found


def remove_all_but(folder: Path, keep: Retention) -> None:
    """Remove the checkpoints not to keep, manifest first: without it, a half-removed one no longer counts."""
    for round in keep.superfluous([round_of(manifest) for manifest in manifests(folder)]):
        for suffix in reversed(SUFFIXES):
            (folder / f"{stem(round)}.{suffix}").unlink(missing_ok=True)


def round_of(manifest: Path) -> int:
    """Return the round of a checkpoint, from its manifest's name."""
    return int(manifest.stem.removeprefix("round-"))


def remove_remains(folder: Path, done: int) -> None:
    """Remove temporary files of a killed job, files without a manifest, and damaged checkpoints, which are those after
    round `done`. The user's files stay.
    """
    whole = {path.stem for path in manifests(folder) if path.stem <= stem(done)}
    for path in _ours(folder):
        if path.suffix == ".folder":
            shutil.rmtree(path)
        elif path.stem not in whole:
            path.unlink(missing_ok=True)
