"""Recomputation of a recorded run on all ranks: its rounds trained again from any kept state, its states evaluated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from hpcfed.assembly import assemble
from hpcfed.assembly.left_out import without_facts
from hpcfed.assembly.private import privacy_facts
from hpcfed.errors import InputError
from hpcfed.evaluation.per_client import ClientEvaluator, ClientScores
from hpcfed.loop import scores_of
from hpcfed.provenance.code_of_rounds import CodeOfRounds
from hpcfed.provenance.recorded import RecordedRun
from hpcfed.ranks.devices import device_faults
from hpcfed.ranks.watchdog import Watchdog
from hpcfed.ranks.world import World
from hpcfed.run_folder.checkpoint.layout import layout_of_states
from hpcfed.run_folder.checkpoint.restore import CheckpointReader, RestoredState, holds
from hpcfed.run_folder.contents import CHECKPOINTS, PRIVATE
from hpcfed.run_folder.cut import MODELS
from hpcfed.run_folder.environment import environment
from hpcfed.run_folder.files import INITIAL, PRIVATE_FILES, private_file
from hpcfed.run_folder.folder import kind_of_device
from hpcfed.run_folder.outcome import own_code_named
from hpcfed.run_folder.recorder import MetricsRows, models_of, private_files_of
from hpcfed.run_folder.stopping import Due, due_after
from hpcfed.simulation import Simulation
from hpcfed.types import PERSONAL


@dataclass(frozen=True)
class RoundAgain:
    """A round trained here, or a recorded state evaluated here.

    Attributes:
        row: the round's row, as in the record. Of a recorded state, the row has only the scores and, for a checkpoint,
            the hash and the running totals.
        clients: the per-client evaluation; None if it was not due.
        update_hashes: hashes of the round's updates, in the cohort's order; None if it was not trained, or if the
            recipe does not record them.
    """

    row: Mapping[str, Any]
    clients: ClientScores | None
    update_hashes: np.ndarray | None = None


class Again:
    """A simulation that recomputes rounds of a recorded run with one version of its code. Used on all ranks together.

    Args:
        run: the recorded run.
        code: the version of the user's code, and its rounds.
        world: all ranks.
        watchdog: watches the ranks for hangs.

    Attributes:
        round: the round whose end the simulation has reached; 0: it is at the initial model.
        environment: content that ``environment.json`` would have on this machine.
    """

    def __init__(self, run: RecordedRun, code: CodeOfRounds, world: World, watchdog: Watchdog):
        self._run, self._code, self._world, self._watchdog = run, code, world, watchdog
        self._stack = ExitStack()
        self.round = 0

    def __enter__(self) -> Again:
        with ExitStack() as stack:
            stack.enter_context(self._code.imported())
            stack.enter_context(own_code_named())
            stack.enter_context(device_faults(self._world))
            began_on = kind_of_device(self._run.environment)
            self._parts, self._evaluator = assemble(
                self._code.recipe, self._world, None, self._watchdog, began_on=began_on
            )
            stack.enter_context(self._parts.federation)
            stack.enter_context(self._parts.clients)
            self._client_evaluator = ClientEvaluator(self._code.recipe.evaluate, self._parts, self._evaluator)
            self._simulation = Simulation(self._parts)
            self._rows = MetricsRows(self._parts, {})
            device, recipe = self._parts.model.vector.device, self._code.recipe
            self.environment = environment(
                self._world, device, recipe.reduction, recipe.bits, deterministic=recipe.deterministic
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def facts(self) -> dict[str, Any]:
        """Entries of ``environment.json`` that depend on the recipe and the data alone, not on the machine."""
        found = {"method": self._parts.method.name, "evaluated_samples": self._evaluator.num_samples}
        return found | without_facts(self._code.recipe, self._parts.federation) | privacy_facts(self._parts)

    def enter(self, round: int) -> str:
        """Set the simulation to the checkpoint of a round, or to the initial model if 0; return "" if that succeeded.

        Otherwise return why not: damage of the checkpoint, or `OTHER_STATES`, if the recipe now needs other states.

        Raises:
            EnvironmentFailure: a file of the checkpoint cannot be read.
        """
        self._watchdog.stage(f"the state after round {round}")
        self._simulation.begin_again()
        self._rows = MetricsRows(self._parts, {})
        self.round = 0
        if not round:
            return ""
        try:
            found = self._read(round)
        except InputError as damage:
            return str(damage)
        if not holds(found.replicated, self._simulation.replicated()):
            return OTHER_STATES
        self.restore(found)
        return ""

    def state(self) -> RestoredState:
        """Return a copy of the simulation's state, from which the next version of the code can continue."""
        own, simulation = self._parts.clients, self._simulation
        clients = {
            client: {name: tensor.cpu().clone() for name, tensor in (own.get(client) or {}).items()} for client in own
        }
        progress = {"magnitudes": simulation.magnitudes.state(), "totals": dict(self._rows.totals)}
        return RestoredState(self.round, simulation.replicated(), clients, progress)

    def restore(self, found: RestoredState) -> None:
        """Set the simulation to a state from `state` or from a checkpoint."""
        self._simulation.begin_again()
        self._simulation.restore(found.replicated, found.clients)
        self._simulation.magnitudes.restore(found.progress["magnitudes"])
        self._rows = MetricsRows(self._parts, found.progress["totals"])
        self.round = found.round

    def _read(self, round: int) -> RestoredState:
        layout = layout_of_states(self._parts, self._simulation.w)
        folder, placement = self._run.folder / CHECKPOINTS, self._parts.placement
        wanted = self._simulation.replicated()
        return CheckpointReader(folder, layout, placement, self._world).of_round(round, wanted)

    def measured(self, due: Due) -> RoundAgain:
        """Evaluate the simulation's state on the test set, the training sets and per client, each if set in `due`."""
        self._watchdog.stage(f"round {self.round}: evaluation")
        found = self._scores(self.round, due)
        return RoundAgain({"hash": self._simulation.hash, **self._rows.counts, **found[0]}, found[1])

    def next(self, due: Due) -> RoundAgain:
        """Train the next round, then evaluate what is due by the recipe or set in `due` (see `measured`).

        Raises:
            Diverged, InputError, EnvironmentFailure: the training failed.
        """
        self.round += 1
        recipe_due = due_after(self._code.recipe, self.round)
        with self._watchdog.rounds(signs=self._parts.mpi_is_free):
            result = self._simulation.round(self.round)
        test, train, of_clients = (one or other for one, other in zip(recipe_due, due, strict=True))
        scores, clients = self._scores(self.round, (test, train, of_clients))
        row = self._rows.row(self.round, result, scores, clients, {})
        return RoundAgain(row, clients, result.update_hashes)

    def _scores(self, round: int, due: Due) -> tuple[Mapping[str, Any], ClientScores | None]:
        scores, clients = scores_of(self._simulation, self._parts, self._evaluator, self._client_evaluator, round, due)
        summary = None if clients is None else clients.summary()
        return {**scores, "clients": summary}, clients

    def perturb(self) -> None:
        """Move each non-zero parameter of the model to a neighbouring floating-point number, up or down at random."""
        w = self._simulation.w
        up = torch.from_numpy(np.random.default_rng(0).random(w.shape) < 0.5)
        infinity = torch.full_like(w, torch.inf)
        moved = torch.nextafter(w, torch.where(up, infinity, -infinity))
        self._simulation.w = torch.where(w == 0, w, moved)

    def is_as_kept(self) -> bool:
        """Whether the checkpoint of this round equals the simulation's state bit for bit, clients' states too."""
        try:
            kept = self._read(self.round)
        except InputError:
            return False
        here = self._simulation.replicated()
        same = [holds(kept.replicated, here) or bool(self._run.measured_otherwise(self.round))]
        same += [{*kept.replicated[TOUCHED].tolist()} == {*here[TOUCHED].tolist()}]
        same += [_same(kept.replicated[name], here[name]) for name in kept.replicated.keys() & here.keys() - {TOUCHED}]
        magnitudes = json.loads(json.dumps(self._simulation.magnitudes.state()))
        same += [kept.progress["magnitudes"] == magnitudes, kept.progress["totals"] == self._rows.totals]
        initial = self._parts.method.local.begin(self._parts.initial_w)
        for client, state in kept.clients.items():
            own = self._parts.clients.get(client) or initial
            same += [_same(tensor, own[name].cpu()) for name, tensor in state.items()]
        return all(self._world.gather(all(same)))

    def wrong_files(self, tolerance: float | None = None) -> list[str]:
        """Return names of model and private-part files that differ from the simulation's state after the last round.

        Missing and superfluous files are among them. For a model that is not kept, the certified SHA-256 is compared.

        Args:
            tolerance: difference allowed in a tensor of the initial private part, which is drawn at random, relative to
                the tensor's largest entry; None: that file, like all others, must agree bit for bit.

        Raises:
            OSError: a file cannot be read.
        """
        folder, model, simulation = self._run.folder, self._parts.model, self._simulation
        w = simulation.evaluated().cpu()
        expected = dict(models_of(model, simulation.w, w, self._evaluator.averaged_for(w)))
        private = dict(private_files_of(self._parts))
        wrong = [name for name, content in private.items() if _bytes(folder / name) != content]
        if tolerance is not None and INITIAL in wrong and _is_near(folder / INITIAL, private[INITIAL], tolerance):
            wrong.remove(INITIAL)
        found = self._world.gather(([*private], wrong))
        names = {name for own, _ in found for name in own}
        others = {name for name in _private_files(folder) if name not in names}
        wrong = [name for _, own in found for name in own]
        certified = self._run.not_kept()
        wrong += [name for name in MODELS if _bytes(folder / name) != expected.get(name) and name not in certified]
        wrong += [name for name, digest in certified.items() if _sha256(expected.get(name)) != digest]
        return sorted({*wrong, *others})

    def left_files(self) -> list[str]:
        """Return the names of the files of models and private parts that are in the run folder."""
        models = [name for name in MODELS if (self._run.folder / name).is_file()]
        return [*models, *_private_files(self._run.folder)]

    def measured_files(self, due: Due) -> RoundAgain:
        """Evaluate the models and private parts in the run folder, in place of a checkpoint of the last round.

        The simulation cannot be used afterwards. `due`: see `measured`.

        Raises:
            InputError: a file is damaged, or has the parameters of another module.
        """
        folder, model, parts = self._run.folder, self._parts.model, self._parts
        self.enter(0)
        name = MODELS[1] if (folder / MODELS[1]).exists() else MODELS[0]
        personal = parts.trains_personal
        begun = parts.method.local.begin(parts.initial_w) if model.own or personal else {}

        def load() -> None:
            for client in parts.placement.at_home(self._world.rank).tolist() if begun else ():
                if (folder / private_file(client)).exists():
                    model.load_private_file(folder / private_file(client), personal=personal)
                    own_model = {PERSONAL: model.vector.clone()} if personal else {}
                    parts.clients.commit({client: {**begun, **model.private_state(), **own_model}})
            if model.own:
                model.load_private_file(folder / INITIAL)
            model.load_file(folder / name)

        self._world.together(load)
        w, averaged = model.vector.clone(), model.averaged
        round = len(self._run.rows)
        test, train, clients = due
        with model.with_averaged(averaged):
            scores = self._evaluator(w, test=test, train=train) if test or train else self._evaluator.nothing
            of_clients = self._client_evaluator(w, round) if clients else None
        return RoundAgain({**scores, "clients": None if of_clients is None else of_clients.summary()}, of_clients)


OTHER_STATES = "other states than evaluate.model now needs"
TOUCHED = "touched"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.detach().cpu().contiguous().numpy().tobytes() == other.detach().cpu().contiguous().numpy().tobytes()


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _sha256(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def _is_near(path: Path, content: bytes, tolerance: float) -> bool:
    """Whether a file's tensors differ from those of `content` by at most `tolerance` times a tensor's largest entry."""
    try:
        found, expected = load(path.read_bytes()), load(content)
    except (OSError, SafetensorError):
        return False
    if {name: (own.dtype, own.shape) for name, own in found.items()} != {
        name: (own.dtype, own.shape) for name, own in expected.items()
    }:
        return False
    pairs = ((found[name].double(), own.double()) for name, own in expected.items() if own.numel())
    return all(bool((one - other).abs().max() <= tolerance * other.abs().max()) for one, other in pairs)


def _private_files(folder: Path) -> list[str]:
    place = folder / PRIVATE
    entries = place.iterdir() if place.is_dir() else ()
    return [f"{PRIVATE}/{entry.name}" for entry in entries if PRIVATE_FILES.fullmatch(entry.name)]
