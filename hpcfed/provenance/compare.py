"""``hpcfed compare``: the first round, client and step at which two runs differ, and what differs there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcfed.errors import Diverged, InputError, first_of
from hpcfed.provenance.code_of_rounds import NO_PERMISSION, Permission
from hpcfed.provenance.cohorts import with_cohorts
from hpcfed.provenance.differences import Difference, in_bits, own_doubts
from hpcfed.provenance.recorded import RecordedRun, placed_recipe, recorded
from hpcfed.provenance.replay.capture import reports_of
from hpcfed.provenance.replay.enter import RewoundRun, entered
from hpcfed.provenance.replay.neighbours import dependences
from hpcfed.provenance.replay.replay import Replay, replay_in
from hpcfed.run_folder.code import CODE_FILE
from hpcfed.run_folder.files import RECIPE, read_environment, read_mapping, read_recipe
from hpcfed.run_folder.identity import differences
from hpcfed.run_folder.machines import moves_in_a_line, of_environments
from hpcfed.run_folder.rounds import RECORD, read_rounds
from hpcfed.run_folder.update_hashes import UPDATE_HASHES, read_update_hashes
from hpcfed.types import State

SAME, PART = 0, 1
"""Exit codes: the models are the same in all common rounds; they differ after some round."""
UNIMPORTANT = ("name", "output", "observers", "checkpoint", "watchdog", "update_hashes", "verify_data", "data_access")
"""Keys of recipes that cannot explain a difference between models."""
OF_OWN_STATE = {"client-average", "step-average"}
"""Values of ``evaluate.model`` that keep additional state, which the hash of a round includes."""
OF_TRAINING = ("cohort", "local_loss", "delta_sq", "mean_delta_sq", "server_lr")
DOUBTS = "doubts"
MAX_LISTED = 6
"""Largest number of columns, or of clients, that are named."""
Say = Callable[[str], None]


@dataclass
class Parting:
    """The first difference between two runs, and what may have caused it.

    Attributes:
        rounds: number of rounds in each run's record.
        settings: ``recipe``, ``environment``, ``code`` → lines on what differs there; ``doubts`` → a line for each run
            that, by its own record, may not be reproducible bit for bit.
        round: the first round after which the models differ, by their hashes or, if these cannot be compared, by the
            columns `OF_TRAINING`; None if no common round differs.
        columns: columns that differ in that round; if `round` is None, in the first round with any difference.
        clients: numbers of the clients whose updates differ in that round, in the cohort's order.
        reason: what differs first within that round, or why this is unknown; "" if all hashes are the same.
    """

    rounds: tuple[int, int]
    settings: Mapping[str, list[str]]
    round: int | None = None
    columns: list[Difference] = field(default_factory=list)
    clients: list[int] = field(default_factory=list)
    reason: str = ""

    @property
    def code(self) -> int:
        """The exit code: `PART` if the models differ after some round, else `SAME`."""
        return SAME if self.round is None else PART


def parting(
    runs: Sequence[Path], data: Path | None, code: Path | None, say: Say, permission: Permission = NO_PERMISSION
) -> Parting:
    """Print and return the first difference of two runs and its cause.

    Args:
        runs: the two run folders.
        data, code: current paths of the federation file and of the folder of the user's code; None: as in the recipes.
        say: prints a line.
        permission: whether code from the runs' records may run.

    Raises:
        InputError: a folder is not a run folder, or its record is damaged or has no rounds.
    """
    folders = [run.resolve() for run in runs]
    for folder, run in zip(folders, runs, strict=True):
        if not (folder / RECIPE).is_file():
            raise InputError("not a run folder", where=str(run), remedy="name the output folder of a run")
    first, second = (read_rounds(folder / RECORD) for folder in folders)
    for rows, run in ((first, runs[0]), (second, runs[1])):
        if not rows:
            raise InputError("a run without rounds: nothing to compare", where=str(run), remedy="train it first")
    found = Parting((len(first), len(second)), _settings(folders, runs, (len(first), len(second))))
    for what, texts in found.settings.items():
        for text in texts:
            say(text if what == DOUBTS else f"{what}: {text}")
    models = {read_recipe(folder).get("evaluate", {}).get("model") for folder in folders}
    by_hash = len(models) == 1 or not models & OF_OWN_STATE
    found.round, found.columns = _first_other_round(first, second, say, by_hash)
    if not by_hash:
        found.reason = "hashes are left out: they are of what evaluate.model keeps, too; give both runs the same one"
        say(found.reason)
        return found
    if found.round is None:
        return found
    try:
        places = [with_cohorts(recorded(folder, placed_recipe(folder, data, code), permission)) for folder in folders]
        found.clients, found.reason = _look_into(places, found.round, say)
    except (InputError, Diverged) as error:
        found.reason = f"clients and steps cannot be compared here: {error}"
    say(found.reason)
    return found


def _settings(folders: Sequence[Path], runs: Sequence[Path], rounds: Sequence[int]) -> dict[str, list[str]]:
    """Return `Parting.settings` of two run folders, of these numbers of rounds; the lines name them as in `runs`."""
    there, here = (read_recipe(folder) for folder in folders)
    places = (f"in {runs[0]}", f"in {runs[1]}")
    environments = [read_environment(folder) for folder in folders]
    doubts = [
        f"{folder}: {text}"
        for folder, environment, count in zip(folders, environments, rounds, strict=True)
        for text in (*own_doubts(environment), moves_in_a_line(environment, count))
        if text
    ]
    code = [read_mapping(folder / CODE_FILE).get("files", {}) for folder in folders]
    return {
        "recipe": differences(there, here, UNIMPORTANT, places),
        "environment": [*of_environments(environments[0], environments[1], places)],
        DOUBTS: doubts,
        "code": [*_of_code(code[0], code[1], places)],
    }


def _of_code(first: Mapping[str, Any], second: Mapping[str, Any], places: Sequence[str]) -> Iterator[str]:
    for name in sorted(first.keys() ^ second.keys()):
        yield f"module {name} {places[name in second]} alone"
    for name in sorted(first.keys() & second.keys()):
        if _hash(first, name) != _hash(second, name):
            yield f"module {name} differs"


def _hash(code: Mapping[str, Any], name: str) -> Any:
    return (code.get(name) or {}).get("hash")


def _first_other_round(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]], say: Say, by_hash: bool
) -> tuple[int | None, list[Difference]]:
    """Return `Parting.round` and `Parting.columns`, and print them.

    Args:
        first, second: the rows of the two records.
        say: prints a line.
        by_hash: True: models are compared by recorded hashes; False: rounds are compared by the columns `OF_TRAINING`.
    """
    scores: tuple[int, list[Difference]] | None = None
    for row, other in zip(first, second, strict=False):
        found = in_bits(row, other)
        if not by_hash:
            found = [one for one in found if one.column in OF_TRAINING]
        if found and (found[0].column == "hash" or not by_hash):
            say(f"part in round {row['round']}")
            for one in [one for one in found if one.column != "hash"][:MAX_LISTED]:
                say(f"  {one.column}: {one.recorded} and {one.here}" if one.column != "cohort" else "  cohort differs")
            return int(row["round"]), found
        if found and scores is None:
            scores = int(row["round"]), found
    common = min(len(first), len(second))
    same = "the same model, bit for bit," if by_hash else "the same losses and norms of updates"
    but = f"; but another {scores[1][0].column} in round {scores[0]}" if scores else ""
    say(f"{same} in all {common} rounds{but}")
    if len(first) != len(second):
        say(f"one has {len(first)} rounds, the other {len(second)}")
    return None, scores[1] if scores else []


def _look_into(runs: Sequence[RecordedRun], round: int, say: Say) -> tuple[list[int], str]:
    """Return the numbers of the clients whose updates differ in a round, and a line on the first difference within it.

    Raises:
        InputError, Diverged: the round cannot be computed here.
    """
    cohorts = [run.rows[round - 1]["cohort"] for run in runs]
    if cohorts[0] != cohorts[1]:
        return [], "their cohorts differ: look at seed.cohort, cohort, and the federations"
    begun = [entered(run, round) for run in runs]
    if not torch.equal(begun[0].simulation.w, begun[1].simulation.w):
        return [], f"the models differ before round {round} already: look at seed.model, model and init"
    kept = [_recorded_hashes(run, round) for run in runs]
    hashes = [_hashes_here(one, round) if known is None else known for known, one in zip(kept, begun, strict=True)]
    other = [client for client, one, two in zip(cohorts[0], *hashes, strict=True) if one != two]
    dependent = [
        f"{run.folder}: {found[0]}"
        for run, one in zip(runs, begun, strict=True)
        if (found := dependences(run, one, round, other or None))
    ]
    if not other:
        *lines, last = dependent or [_of_the_sum(runs, kept, round)]
        for line in lines:
            say(line)
        return [], last
    names = begun[0].parts.federation.client_names()
    shown = first_of([f"{client} ({names[client]})" for client in other], MAX_LISTED)
    say(f"clients whose updates differ: {len(other)} of {len(cohorts[0])}: {shown}")
    for line in dependent:
        say(line)
    replays = [replay_in(run, one, round, other[0]) for run, one in zip(runs, begun, strict=True)]
    unlike = [
        run for run, found in zip(runs, replays, strict=True) if found.recorded_hash not in (None, found.reported.hash)
    ]
    for run in unlike:
        say(f"{run.folder}: this machine computes another update of client {other[0]} than it recorded")
    unexplained = "what it reports is not: look at algorithm and guess"
    if unlike:
        unexplained = "computed here: look at the processors and libraries of the two runs, and their settings"
    return other, f"client {other[0]}: {_first_difference(*replays) or f'all its steps are the same, {unexplained}'}"


def _of_the_sum(runs: Sequence[RecordedRun], kept: Sequence[Sequence[int] | None], round: int) -> str:
    """Return a line on a round after which the models differ although all updates are the same."""
    if found := [run for run in runs if any(one["round"] <= round for one in run.environment.get("sentinel", ()))]:
        where = " and ".join(str(run.folder) for run in found)
        return (
            f"all updates are the same, computed here; the sentinel of {where} saw them differ where they were trained"
        )
    says = "all updates are the same: their sum or the server's step differs: look at reduction and algorithm"
    if anew := " and ".join(str(run.folder) for run, known in zip(runs, kept, strict=True) if known is None):
        says = f"{says} ({anew}: without update_hashes, so computed again here; there they may have been others)"
    return says


def _recorded_hashes(run: RecordedRun, round: int) -> list[int] | None:
    """Return the recorded hashes of a round's updates, in the cohort's order; None if the run recorded none."""
    found = read_update_hashes(run.folder / UPDATE_HASHES, [len(row["cohort"]) for row in run.rows], round)
    return None if found is None else [int(value) for value in found]


def _hashes_here(begun: RewoundRun, round: int) -> list[int]:
    """Train all clients of a round again; return the hashes of their updates, in the cohort's order."""
    plan = begun.simulation.plan(round)
    reports = reports_of(begun.parts, plan, range(len(plan.cohort.clients)))
    return [reports[client].hash for client in plan.cohort.clients.tolist()]


def _first_difference(first: Replay, second: Replay) -> str:
    """Return a line on the first difference between two replays of a client: method, data or steps; "" without one."""
    own = [one.reported.task for one in (first, second)]
    for name in ("shift", "mu", "anchor", "from_anchor", "offset", "radius", "after_momentum"):
        if not _same(*(getattr(task.tilt, name) for task in own)):
            return f"the method adds another {name} to its gradients: look at its state and at algorithm"
    if name := _other_tensor(*(task.own for task in own)):
        return f"its {name} at the start are others: look at parameters, and at its rounds before"
    if sample := _other_sample(*(task.samples for task in own)):
        return f"its data differ, {sample} first"
    for one, two in zip_longest(first.steps, second.steps):
        if one is None or two is None:
            return f"it takes {len(first.steps)} steps and {len(second.steps)}"
        if not (_same(one.x, two.x) and _same(one.y, two.y)):
            return f"step {one.number}: another minibatch: look at seed.batches, local.batch_size and augment"
        if one.loss != two.loss or one.gradient != two.gradient:
            values = f"loss {one.loss!r} and {two.loss!r}, ‖gradient‖ {one.gradient!r} and {two.gradient!r}"
            return f"step {one.number}: from the same iterate and minibatch another gradient: {values}"
        if not _same(one.iterate, two.iterate) or one.drift != two.drift:
            return (
                f"step {one.number}: from the same iterate, minibatch and gradient another iterate "
                f"(drift {one.drift!r} and {two.drift!r}): look at the step size, the optimizer and local.matmul"
            )
        if name := _other_tensor({**one.own, **one.buffers}, {**two.own, **two.buffers}):
            return f"step {one.number}: from the same iterate, minibatch and gradient other {name}"
    return ""


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return torch.equal(one, two)
    return one is two or (not isinstance(one, Tensor) and not isinstance(two, Tensor) and one == two)


def _other_tensor(one: State, two: State) -> str:
    """Return the name of a tensor that two states do not share, in lexical order the first; "" without one."""
    return next((name for name in sorted(one.keys() | two.keys()) if not _same(one.get(name), two.get(name))), "")


def _other_sample(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> str:
    """Return the first difference between a client's samples (x, y) in two runs, in words; "" if they are the same."""
    if any(a.shape != b.shape for a, b in zip(one, two, strict=True)):
        return f"{len(one[1])} and {len(two[1])} samples"
    for what, a, b in (("x", one[0], two[0]), ("y", one[1], two[1])):
        other = torch.nonzero((a != b).flatten(1).any(dim=1) if a.dim() > 1 else a != b)
        if len(other):
            return f"{what} of its sample {int(other[0])}"
    return ""
