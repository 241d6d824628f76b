"""The run folder: its files, and whether a run starts, goes on, is finished or is refused there.

    nothing there                               start
    our finished run of the same recipe         say so, exit 0
    our unfinished run of the same recipe       go on from its checkpoint, the record cut to that round
    the same without a checkpoint               start again, the old record kept under previous-N/
    only FREE keys changed                      likewise
    the user's code changed                     refuse, with the files; after `accept_code` go on, both recorded
    anything else changed                       refuse, with the difference
    a run that is going on, files not ours      refuse

`fresh` starts anew and keeps our run that is there under previous-N/; files that are not ours stay in place.

Rank 0 alone reads and writes the folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

import xxhash
from safetensors import SafetensorError, safe_open

from hpcfed.config.load import dump_yaml, to_plain
from hpcfed.config.recipe import Recipe
from hpcfed.data.unchanged import Facts, check_data
from hpcfed.errors import Busy, EnvironmentFailure, InputError
from hpcfed.io.atomic import to_disk, write_whole
from hpcfed.io.text import LONGEST, Malformed, parse_json, parse_yaml, read_text
from hpcfed.ranks.world import World
from hpcfed.run_folder.code import FRESH, NAME, CodeRecord, references
from hpcfed.run_folder.rounds import count_rounds, parse_rounds

PLACES = ("output", "python_path", "data_access", "verify_data", "gpu_reduce", "observers")
"""Keys for the places of files, how they are read, and observers: they never invalidate a finished run."""
FREE = ("rounds", "evaluate", "stop", "checkpoint", "watchdog", *PLACES)
"""Keys that may change when a run is continued."""
RECORD = (
    "metrics.jsonl",
    "clients.csv",
    "result.json",
    "environment.json",
    NAME,
    "model.safetensors",
    "model-evaluated.safetensors",
    "checkpoints",
    "logs",
)
"""Files that are put aside when a run starts again."""
ASIDE = "previous-*"
"""Folders of earlier runs."""
BEFORE = (".lock", "logs", "checkpoints", NAME)
"""Entries that may exist before a run has written its recipe."""
REMAINS = re.compile(rf"\.({'|'.join(map(re.escape, ('recipe.yaml', 'report.html', *RECORD)))})\.\d+\.tmp")
"""Temporary files of a job that was killed in `hpcfed.io.atomic.write_whole`."""


class RunFolder:
    """The folder of one run.

    Args:
        path: of the folder.
        fresh: whether our run that is there is put aside for a new one.
    """

    def __init__(self, path: Path, *, fresh: bool = False):
        self.path, self.fresh = path, fresh
        self.code = CodeRecord(path)
        self.metrics = path / "metrics.jsonl"
        self.clients = path / "clients.csv"
        self._lock: IO[str] | None = None

    def is_finished(self, recipe: Recipe) -> bool:
        """Whether this recipe's run is here and finished, and `fresh` is not set; writes nothing.

        Raises:
            InputError: the folder holds another recipe's run, one of other code, files that are not ours, or a record
                with another number of rounds than the finished run's.
        """
        wanted = to_plain(recipe)
        try:
            found = self._read_recipe() if self._has_files() else None
        except OSError as error:
            raise self._unusable(error) from None
        if found is None or self.fresh:
            return False
        self._refuse_other(found, wanted)
        self.check_code(recipe)
        same = _comparable(found, PLACES) == _comparable(wanted, PLACES)
        result = self._read_json("result.json")
        if not same or result.get("status") != "finished":
            return False
        self._refuse_other_record(result.get("rounds"))
        self._refuse_lost_model()
        return True

    @contextmanager
    def held(self, world: World) -> Iterator[None]:
        """Create the folder and lock it against other jobs.

        Raises:
            InputError: a run is going on there, or the folder cannot be written.
        """
        made = [path for path in (self.path, *self.path.parents) if not path.exists()] if world.is_root else []
        world.on_root(self._take_lock)
        try:
            yield
        finally:
            if self._lock is not None:
                self._leave_nothing_empty(made)
                self._lock.close()
                self._lock = None

    def _leave_nothing_empty(self, made: Sequence[Path]) -> None:
        """If the run left nothing, remove the lock file and the folders that were created for it."""
        with suppress(OSError):
            if [entry.name for entry in self.path.iterdir()] == [".lock"]:
                (self.path / ".lock").unlink()
                for path in made:
                    path.rmdir()

    def _take_lock(self) -> None:
        """Lock the folder until the lock file is closed or the process ends; no lock if the file system has none.

        Raises:
            Busy: a run is going on there.
            InputError: the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("a+", encoding="utf-8")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(
                "a run is going on in this folder", where=str(self.path), remedy="wait for it, or choose another output"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise self._unusable(error) from None

    def check_code(self, recipe: Recipe) -> None:
        """Refuse to go on with other code than that of the run here.

        Raises:
            InputError: naming the files.
        """
        if self._goes_on():
            self.code.refuse_changes(recipe)

    def word_of_code(self, recipe: Recipe) -> str:
        """Return a remark: this run's code is not recorded, or has changed and the run starts again; else ""."""
        if self.fresh or not self._has_rounds() or not references(recipe):
            return ""
        if not self.code.exists():
            return "hpcfed 0.1 kept no record of your code: whether it has changed is not known"
        changed = "" if self._goes_on() else self.code.changes(recipe)
        return f"starts again, without a checkpoint, with other code: {changed}" if changed else ""

    def _goes_on(self) -> bool:
        """Whether a run of the same recipe would keep results from here: it is finished, or has a checkpoint."""
        return self._read_json("result.json").get("status") == "finished" or any(
            (self.path / "checkpoints").glob("round-*.json")
        )

    def accept_code(self, recipe: Recipe) -> None:
        """Let the run here go on with the user's present code, and record both.

        Raises:
            Busy: it is going on already.
            InputError: the folder holds another recipe's run, or other files, or cannot be written.
        """
        try:
            if self._has_files() and self._goes_on():
                self._refuse_other(self._read_recipe(), to_plain(recipe))
                with self.held(World()):
                    self.code.write(recipe, self.rounds())
        except OSError as error:
            raise self._unusable(error) from None

    def set_aside(self) -> None:
        """Move the run here to previous-N/, to make room for another.

        Raises:
            Busy: it is going on.
            InputError: the folder holds other files, or cannot be written.
        """
        try:
            if self._has_files():
                self._read_recipe()
                with self.held(World()):
                    self._put_aside()
                    (self.path / "recipe.yaml").unlink()
        except OSError as error:
            raise self._unusable(error) from None

    def claim(self, recipe: Recipe, done: int, state: str | None = None) -> Facts:
        """Cut the record to the `done` rounds that a checkpoint holds, or put it aside; write the resolved recipe.

        `state` is the hash of the checkpoint's model and server state, which the record of round `done` must have.
        Returns the facts of the federation file, to be kept in ``environment.json``.

        Raises:
            InputError: the folder cannot be written, its record is damaged, the data are not the recorded ones, or the
                loaded code is not that of the `done` rounds.
            EnvironmentFailure: the data cannot be read.
        """
        known = self._read_json("environment.json").get("data")
        before = known if isinstance(known, dict) else None
        data = check_data(recipe.data, recipe.data_content, before, goes_on=done > 0, always=recipe.verify_data)
        try:
            for entry in self.path.iterdir():
                if REMAINS.fullmatch(entry.name):
                    entry.unlink()
            if done:
                self.code.refuse_changes(recipe)
                self._cut(done, state)
            elif self._has_rounds() or self.fresh:
                self._put_aside()
            self.code.write(recipe, done)
            write_whole(self.path / "recipe.yaml", dump_yaml(to_plain(recipe)))
        except OSError as error:
            raise self._unusable(error) from None
        return data

    def write(self, name: str, content: bytes | str | Mapping[str, Any]) -> None:
        """Write one file of the folder, whole or not at all; a mapping is written as JSON.

        Raises:
            EnvironmentFailure: the file system refuses.
        """
        text = json.dumps(content, indent=1) + "\n" if isinstance(content, Mapping) else content
        try:
            write_whole(self.path / name, text)
        except OSError as error:
            raise EnvironmentFailure("cannot be written", where=str(self.path / name), got=str(error)) from error

    def to_disk(self) -> None:
        """Wait until the recorded rounds are on disk.

        Raises:
            OSError: as the system reports it.
        """
        for record in (self.metrics, self.clients):
            if record.exists():
                to_disk(record)

    def rounds(self) -> int:
        """Return the number of recorded rounds."""
        return count_rounds(self.metrics)

    def _has_files(self) -> bool:
        """Whether there are files other than those of `BEFORE`, temporary files and earlier runs."""
        if not self.path.exists():
            return False
        return any(
            entry.name not in BEFORE and not REMAINS.fullmatch(entry.name) and not entry.match(ASIDE)
            for entry in self.path.iterdir()
        )

    def _read_recipe(self) -> dict[str, Any]:
        path = self.path / "recipe.yaml"
        if not path.is_file():
            raise InputError(
                "output holds files that are not a run's",
                where=str(self.path),
                got=", ".join(sorted(entry.name for entry in self.path.iterdir())[:3]),
                remedy="choose another output",
            )
        try:
            found = parse_yaml(read_text(path, LONGEST))
        except Malformed:
            found = None
        if not isinstance(found, dict):
            raise InputError("not a run's recipe", where=str(path), remedy="choose another output")
        return found

    def _refuse_other(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        before, now = _comparable(found, FREE), _comparable(wanted, FREE)
        changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
        if changed:
            details = ", ".join(f"{key} {before.get(key)!r} there and {now.get(key)!r} here" for key in changed[:3])
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise InputError(
                "output holds another recipe's run", where=str(self.path), got=details + more, remedy=FRESH
            )

    def _refuse_other_record(self, rounds: Any) -> None:
        if self.rounds() != rounds:
            raise InputError(
                "the record of this finished run was removed or changed",
                where=str(self.metrics),
                expected=f"{rounds} rounds",
                got=str(self.rounds()),
                remedy="restore it, or choose another output",
            )

    def _refuse_lost_model(self) -> None:
        path = self.path / "model.safetensors"
        try:
            with safe_open(path, "np"):
                return
        except (OSError, SafetensorError) as error:
            raise InputError(
                "the model of this finished run was removed or damaged",
                where=str(path),
                got=getattr(error, "strerror", None) or str(error),
                remedy="restore it, or train again with --fresh",
            ) from None

    def _read_json(self, name: str) -> dict[str, Any]:
        """Return the mapping in a JSON file of the folder; empty if the file is missing or damaged.

        Raises:
            InputError: it cannot be read.
        """
        try:
            found = parse_json(read_text(self.path / name))
        except (FileNotFoundError, ValueError):
            return {}
        except OSError as error:
            raise self._unusable(error) from None
        return found if isinstance(found, dict) else {}

    def _cut(self, done: int, state: str | None) -> None:
        lines: list[bytes] = []
        with suppress(FileNotFoundError), self.metrics.open("rb") as record:
            lines = [line for line in islice(record, done) if line.endswith(b"\n")]
        if len(lines) < done:
            raise InputError(
                "the record holds fewer rounds than the checkpoint",
                where=str(self.metrics),
                expected=f"at least {done}",
                got=str(len(lines)),
                remedy=FRESH,
            )
        (last,) = deque(parse_rounds(lines, self.metrics), maxlen=1)  # raises on damage, which would stay for good
        if state is not None and last.get("hash") != state:
            what = "the record is of another run than the checkpoint"
            raise InputError(
                what, where=str(self.metrics), expected=f"hash {state}", got=str(last["hash"]), remedy=FRESH
            )
        write_whole(self.metrics, b"".join(lines))
        if self.clients.exists():
            self._cut_clients(done)
        for name in ("result.json", "model.safetensors", "model-evaluated.safetensors"):
            (self.path / name).unlink(missing_ok=True)

    def _cut_clients(self, done: int) -> None:
        """Cut ``clients.csv`` after the last row of the `done` rounds; its last row may be incomplete."""
        with self.clients.open("r+b") as table:
            kept = len(table.readline())
            for row in table:
                round = row.partition(b",")[0]
                if not (row.endswith(b"\n") and round.isdigit() and int(round) <= done):
                    break
                kept += len(row)
            table.truncate(kept)

    def _has_rounds(self) -> bool:
        return self.metrics.exists() and self.metrics.stat().st_size > 0

    def _put_aside(self) -> None:
        """Move a run's files to previous-N/; the recipe is copied there."""
        if not any((self.path / name).exists() for name in ("recipe.yaml", *RECORD)):
            return
        number = 1
        while (aside := self.path / f"previous-{number}").exists():
            number += 1
        aside.mkdir()
        if (self.path / "recipe.yaml").exists():
            write_whole(aside / "recipe.yaml", (self.path / "recipe.yaml").read_bytes())
        for entry in (self.path / name for name in RECORD):
            if entry.exists():
                entry.rename(aside / entry.name)

    def _unusable(self, error: OSError) -> InputError:
        what = error.strerror or str(error)
        return InputError("output cannot be used", where=str(self.path), got=what, remedy="choose another output")


def refuse_both(fresh: bool, accept_code: bool) -> None:
    """Refuse `fresh` together with `accept_code`.

    Raises:
        InputError: both are set.
    """
    if fresh and accept_code:
        raise InputError("--fresh and --accept-code", expected="one of them", got="both")


def identity(recipe: Recipe, free: tuple[str, ...] = FREE) -> str:
    """Return a digest of the keys that decide the result of a recipe's rounds: all but the `free` ones."""
    return xxhash.xxh3_128_hexdigest(json.dumps(_comparable(to_plain(recipe), free), sort_keys=True).encode())


def _comparable(recipe: Mapping[str, Any], free: tuple[str, ...]) -> dict[str, Any]:
    """Return the keys that decide the result, dotted; without the path of the data if its content hash is known."""
    data = ("data",) if recipe.get("data_content") else ()
    return dict(_dotted({key: value for key, value in recipe.items() if key not in (*free, *data)}))


def _dotted(section: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in section.items():
        rows += _dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return rows
