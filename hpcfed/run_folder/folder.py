"""The run folder: its files, and whether a run starts there, goes on, is finished already, or is refused.

    nothing there                               start
    our finished run of the same recipe         say so, exit 0
    our unfinished run of the same recipe       go on from its checkpoint, the record cut to that round
    the same without a checkpoint               start again, the old record kept under previous-N/
    only FREE keys changed                      likewise
    the user's code changed                     refuse, with the files; after `accept_code` go on, both recorded
    anything else changed                       refuse, with the difference
    the same, but no round was trained          start, the files kept under previous-N/
    a run that is going on, files not ours      refuse

With `fresh` a run starts anew; a run that is there is moved to previous-N/, and files that no run wrote stay in place.

Rank 0 writes all files, except that each rank writes its log, and its clients' private parts and checkpoint sections.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from hpcfed.config.load import dump_yaml, to_plain
from hpcfed.config.recipe import Evaluate, Recipe
from hpcfed.data.unchanged import FileFacts, check_data
from hpcfed.errors import InputError, first_of
from hpcfed.io.atomic import to_disk, write_whole, writing
from hpcfed.io.text import UNPRINTABLE, Malformed, refuse_special
from hpcfed.ranks.world import World
from hpcfed.run_folder import files
from hpcfed.run_folder.code import FRESH, CodeRecord, references, without_given_observers
from hpcfed.run_folder.contents import refuse_links
from hpcfed.run_folder.cut import cut
from hpcfed.run_folder.identity import FOLLOWED, FREE, NOT_OF_THE_RESULT, differences
from hpcfed.run_folder.lock import FolderLock
from hpcfed.run_folder.rounds import RECORD, count_rounds
from hpcfed.run_folder.update_hashes import UPDATE_HASHES


class RunFolder:
    """The folder of one run.

    Args:
        path: path of the folder.
        fresh: whether a run that is there is moved to previous-N/ and a new one started.
    """

    def __init__(self, path: Path, *, fresh: bool = False):
        self.path, self.fresh = path, fresh
        self.code = CodeRecord(path)
        self.metrics = path / RECORD
        self.clients = path / files.CLIENTS
        self.update_hashes = path / UPDATE_HASHES
        self._lock = FolderLock(path)

    def is_finished(self, recipe: Recipe) -> bool:
        """Whether the folder has this recipe's finished run, and `fresh` is not set; writes nothing.

        If the recipe leaves ``evaluate.model`` to its method, any value of the finished run is accepted; so are other
        values of `NOT_OF_THE_RESULT`, whose defaults may change with the version.

        Raises:
            InputError: the folder has a run of another recipe or of other code, files that no run wrote, or a record
                with another number of rounds than ``result.json`` says.
        """
        found = self._recorded()
        if found is None or self.fresh:
            return False
        wanted = _as_recorded(recipe, found)
        if not self._is_untrained():
            self._refuse_other(found, wanted)
        self.check_code(recipe)
        if differences(found, wanted, NOT_OF_THE_RESULT) or not self.has_result():
            return False
        self._refuse_lost_model()
        return True

    def has_result(self) -> bool:
        """Whether the folder has a finished run, of any recipe.

        Raises:
            InputError: the record has another number of rounds than ``result.json`` says.
        """
        result = files.read_mapping(self.path / files.RESULT)
        if result.get("status") != "finished":
            return False
        self._refuse_other_record(result.get("rounds"))
        return True

    def refuse_other_result(self, recipe: Recipe) -> None:
        """Refuse a folder whose run is not exactly this recipe's: `FREE` keys that have an effect count, too.

        Raises:
            InputError: the folder has a run of another recipe, or files that no run wrote.
        """
        if (found := self._recorded()) is not None:
            remedy = "remove it to train the run again, or add --fresh to sweep, study or reproduce"
            self._refuse_other(found, _as_recorded(recipe, found), NOT_OF_THE_RESULT, remedy)

    @contextmanager
    def held(self, world: World) -> Iterator[None]:
        """Create the folder and lock it against other jobs.

        Raises:
            Busy: another job's run is going on in the folder.
            InputError: the folder cannot be written, or has links in the place of a run's files.
        """
        world.on_root(self._take)
        try:
            yield
        finally:
            self._lock.release()

    def _take(self) -> None:
        if UNPRINTABLE.search(str(self.path)):  # its recipe names it, and could not be read again
            remedy = "choose another output, or set a locale of UTF-8"
            raise InputError("output cannot be used", where=str(self.path), got="a path not in UTF-8", remedy=remedy)
        try:
            refuse_links(self.path)
        except OSError as error:
            raise files.unusable(self.path, error) from None
        self._lock.take()

    def check_code(self, recipe: Recipe) -> None:
        """Refuse to continue the run in the folder with other user code than it was trained with.

        Raises:
            InputError: the code differs; the message has the files.
        """
        if self._can_go_on():
            self.code.refuse_changes(recipe)

    def code_remark(self, recipe: Recipe) -> str:
        """Return a line to print if the user's code is not recorded, or changed so that a run starts again; or ""."""
        if self.fresh or not self._has_rounds() or not references(recipe):
            return ""
        if not self.code.exists():
            before = json.dumps(files.read_recipe(self.path))
            if not any(reference in before for reference in references(recipe)):  # a metric that is new here
                return ""
            return "no record of your code is here: whether it has changed is not known"
        changed = "" if self._can_go_on() else self.code.changes(recipe)
        return f"starts again, without a checkpoint, with other code: {changed}" if changed else ""

    def _can_go_on(self) -> bool:
        """Whether the run in the folder can be continued or kept: it is finished, or has a checkpoint."""
        return files.read_mapping(self.path / files.RESULT).get("status") == "finished" or any(
            (self.path / "checkpoints").glob("round-*.json")
        )

    def _is_untrained(self) -> bool:
        """Whether a run began here and has no round yet; without a lock file, the recipe may be the user's."""
        return (self.path / files.LOCK).exists() and not self._has_rounds() and not self._can_go_on()

    def accept_code(self, recipe: Recipe) -> None:
        """Allow the run in the folder to continue with changed user code, which is recorded beside the code before.

        Raises:
            Busy: the run is going on.
            InputError: the folder has a run of another recipe, or other files, or cannot be written.
        """
        try:
            if files.has_files(self.path) and self._can_go_on():
                with self.held(World()):
                    self._refuse_other(files.read_recipe(self.path), to_plain(recipe))
                    self.code.accept(recipe)
        except OSError as error:
            raise files.unusable(self.path, error) from None

    def set_aside(self) -> None:
        """Move the run in the folder to previous-N/, to make room for another.

        Raises:
            Busy: the run is going on.
            InputError: the folder has files that no run wrote, or cannot be written.
        """
        try:
            if files.has_files(self.path):
                files.read_recipe(self.path)
                with self.held(World()):
                    files.put_aside(self.path)
                    (self.path / files.RECIPE).unlink()
        except OSError as error:
            raise files.unusable(self.path, error) from None

    def as_measured(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the recorded ``evaluate`` of the run in the folder, whose rounds are all done."""
        found = files.read_recipe(self.path).get("evaluate")
        try:
            return recipe.model_copy(update={"evaluate": Evaluate.model_validate(found)})
        except ValidationError:  # of an earlier version, or changed by hand
            return recipe

    def suspicions(self) -> list[Mapping[str, Any]]:
        """Return the sentinel's findings in ``environment.json``: a mapping for each differing update; [] if none."""
        found = files.read_mapping(self.path / "environment.json").get("sentinel")
        return found if isinstance(found, list) else []

    def with_recorded_engine(self, recipe: Recipe) -> Recipe:
        """Return the recipe with ``auto`` in ``local`` replaced by the engine and tile of the run that it continues."""
        if not self._continues():
            return recipe
        recorded, local = files.read_recipe(self.path).get("local") or {}, recipe.local
        chooses = local.engine == "auto" and "engine" in recorded
        followed = [key for key in FOLLOWED if key in recorded and (chooses or key not in ("engine", "matmul"))]
        # Beside ``engine: auto``, matmul follows the recorded engine whatever the recipe says.
        keys = {key: recorded[key] for key in followed if key == "matmul" or getattr(local, key) == "auto"}
        return with_local(recipe, keys)

    def began_on(self, recipe: Recipe) -> str | None:
        """Return the kind of device of the run that a recipe with ``device: auto`` continues; None if not known."""
        if recipe.device != "auto" or not self._continues():
            return None
        return kind_of_device(files.read_environment(self.path))

    def _continues(self) -> bool:
        """Whether a run here goes on from what is in the folder."""
        return not self.fresh and (self.path / files.RECIPE).is_file() and self._can_go_on()

    def claim(
        self,
        recipe: Recipe,
        done: int,
        state: str | None,
        say: Callable[[str], None],
        *,
        client_rows: int,
        trains: bool,
    ) -> FileFacts:
        """Prepare the folder for the run: cut its record to the `done` rounds, or move it aside; write the recipe.

        Args:
            recipe: the run's resolved recipe.
            done: number of rounds in the checkpoint; 0: there is no checkpoint.
            state: hash of the checkpoint's model and server state, which the record of round `done` must have.
            say: prints a line.
            client_rows: number of rows that an evaluation writes to ``clients.csv`` for each model.
            trains: whether more rounds are trained; if not, ``code.json`` is left as it is.

        Returns:
            The facts of the federation file, to be kept in ``environment.json``.

        Raises:
            InputError: the folder cannot be written, its record is damaged, the data are not the recorded ones, or the
                loaded code is not that of the `done` rounds.
            EnvironmentFailure: the data cannot be read.
        """
        known = files.read_mapping(self.path / "environment.json").get("data")
        before = known if isinstance(known, dict) else None
        data = check_data(recipe.data, recipe.data_content, before, goes_on=done > 0, always=recipe.verify_data)
        try:
            files.remove_remains(self.path)
            if done:
                self.code.refuse_changes(recipe)
                cut(self.path, done, state, client_rows=client_rows, update_hashes=recipe.update_hashes)
            elif self._has_rounds() or self.fresh:
                files.put_aside(self.path)
            elif files.has_files(self.path) and (changed := _changed(files.read_recipe(self.path), to_plain(recipe))):
                aside = files.put_aside(self.path)
                ended = "a run of another recipe ended here before its first round"
                say(f"{recipe.name}: {ended}; kept in {aside}: {changed}")
            else:
                (self.path / files.RESULT).unlink(missing_ok=True)  # of a run that ended before its first round
            if trains:
                self.code.write(recipe, done)
            write_whole(self.path / files.RECIPE, dump_yaml(to_plain(without_given_observers(recipe))))
        except OSError as error:
            raise files.unusable(self.path, error) from None
        return data

    def write(self, name: str, content: bytes | str | Mapping[str, Any]) -> None:
        """Write one file of the folder, whole or not at all; a mapping is written as JSON.

        Raises:
            EnvironmentFailure: the file cannot be written.
        """
        text = _json_of(content) if isinstance(content, Mapping) else content
        with writing(self.path / name):
            if "/" in name:
                (self.path / name).parent.mkdir(exist_ok=True)
            write_whole(self.path / name, text)

    def to_disk(self) -> None:
        """Wait until the recorded rounds are on disk.

        Raises:
            OSError: a file cannot be synchronised.
        """
        for record in (self.metrics, self.clients, self.update_hashes):
            if record.exists():
                to_disk(record)

    def rounds(self) -> int:
        """Return the number of recorded rounds."""
        return count_rounds(self.metrics)

    def _recorded(self) -> dict[str, Any] | None:
        """Return the recipe of the run in the folder; None if the folder has no files."""
        try:
            return files.read_recipe(self.path) if files.has_files(self.path) else None
        except OSError as error:
            raise files.unusable(self.path, error) from None

    def _refuse_other(
        self, found: dict[str, Any], wanted: dict[str, Any], free: tuple[str, ...] = FREE, remedy: str = FRESH
    ) -> None:
        if changed := _changed(found, wanted, free):
            raise InputError("output holds another recipe's run", where=str(self.path), got=changed, remedy=remedy)

    def _refuse_other_record(self, rounds: Any) -> None:
        if self.rounds() != rounds:
            raise InputError(
                "the record of this finished run was removed or changed",
                where=str(self.metrics),
                expected=f"{rounds} rounds",
                got=str(self.rounds()),
                remedy="restore it, choose another output, or remove the run's folder to train again",
            )

    def _refuse_lost_model(self) -> None:
        path = self.path / "model.safetensors"
        try:
            refuse_special(path)
            with safe_open(path, "np"):
                return
        except (OSError, Malformed, SafetensorError) as error:
            raise InputError(
                "the model of this finished run was removed or damaged",
                where=str(path),
                got=getattr(error, "strerror", None) or str(error),
                remedy="restore it, or train again with --fresh",
            ) from None

    def _has_rounds(self) -> bool:
        """Whether any file of the record has content: ``metrics.jsonl`` alone may have been removed."""
        record = (self.metrics, self.clients, self.update_hashes)
        return any(path.exists() and path.stat().st_size > 0 for path in record)


def kind_of_device(facts: Mapping[str, Any]) -> str | None:
    """Return ``cpu``, or the kind of GPU, from ``environment.json``; None if an earlier version wrote it."""
    kinds = {str(rank["kind"]) for rank in facts.get("per_rank") or () if "kind" in rank}
    return min(kinds - {"cpu"}, default="cpu") if kinds else None


def with_local(recipe: Recipe, keys: Mapping[str, Any]) -> Recipe:
    """Return the recipe with these keys of ``local``."""
    return recipe.model_copy(update={"local": recipe.local.model_copy(update=keys)})


def _as_recorded(recipe: Recipe, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe as plain data, with the ``evaluate.model`` in `found` if it leaves that to its method."""
    wanted = to_plain(recipe)
    if recipe.evaluate.by_method:
        wanted["evaluate"]["model"] = (found.get("evaluate") or {}).get("model", "last")
    return wanted


def _changed(found: Mapping[str, Any], wanted: Mapping[str, Any], free: tuple[str, ...] = FREE) -> str:
    """Return up to three differences between the recipe of a run folder and the wanted one; "" if it is the same."""
    return first_of(differences(found, wanted, free), 3)


def _json_of(content: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a mapping as JSON text, in pieces: a certificate can be long."""
    yield from (piece.encode() for piece in json.JSONEncoder(indent=1).iterencode(content))
    yield b"\n"


def refuse_both(fresh: bool, accept_code: bool) -> None:
    """Refuse `fresh` together with `accept_code`.

    Raises:
        InputError: both are set.
    """
    if fresh and accept_code:
        raise InputError("--fresh and --accept-code", expected="one of them", got="both")
