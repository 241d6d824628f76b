"""``hpcfed verify``: compares a run folder with its certificate, and its rounds with those computed here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, log10
from pathlib import Path
from typing import Any

from hpcfed.config.limits import watchdog_limit
from hpcfed.data.federation import Federation
from hpcfed.errors import Diverged, HpcfedError, InputError, counted
from hpcfed.io.pace import Pace
from hpcfed.provenance.code_of_rounds import CodeOfRounds, Permission, runs
from hpcfed.provenance.differences import (
    beyond,
    from_record,
    is_score,
    lacking,
    largest,
    not_computed,
    of_drawn_model,
    own_doubts,
    tolerance_from,
)
from hpcfed.provenance.recorded import RecordedRun, placed_recipe, recorded
from hpcfed.provenance.replay.neighbours import dependences_of
from hpcfed.provenance.verify.faults import data_faults, ended, ending_faults, folder_faults
from hpcfed.provenance.verify.recompute import OTHER_STATES, Again, RoundAgain
from hpcfed.provenance.verify.spot_check import drawn, oddness, reachable, segments
from hpcfed.provenance.verify.tables import RecordedTables
from hpcfed.provenance.verify.verdict import AGREES, DIFFERS, IN_PART, Verdict
from hpcfed.ranks.watchdog import Watchdog
from hpcfed.ranks.world import World
from hpcfed.run_folder.certificate import Fault
from hpcfed.run_folder.checkpoint.restore import RestoredState
from hpcfed.run_folder.cut import MODELS
from hpcfed.run_folder.files import CERTIFICATE, CLIENTS, RESULT, SIGNATURE
from hpcfed.run_folder.machines import environment_of, of_environments
from hpcfed.run_folder.update_hashes import UPDATE_HASHES

MAX_LISTED = 4
"""Largest number of differing columns that are printed."""
MOST_FAULTS = 20
"""Largest number of faults of a folder and its data that get a line: a record has thousands of rounds."""


@dataclass(frozen=True)
class Verification:
    """Settings of a verification.

    Attributes:
        run: the run folder.
        rounds: number of rounds to draw for a spot check; None: all rounds are computed.
        seed: seed of the draw.
        data, code: current paths of the federation file and of the folder of the user's code; None: as in the recipe.
        signers: an "allowed signers" file of ssh-keygen; a key in it must have signed. None: a signature is optional.
        tolerance: relative difference allowed in a round if this machine computes other bits; None: measured here.
        permission: whether code from the run's record may run.
    """

    run: Path
    rounds: int | None
    seed: int
    data: Path | None = None
    code: Path | None = None
    signers: Path | None = None
    tolerance: float | None = None
    permission: Permission = field(default_factory=Permission)


class _Differs(HpcfedError):
    """Raised when something computed here is not as recorded.

    Attributes:
        faults: what differs: `Fault`, `Difference`, or text.
        round: the round that differs; None if a file or a kept state differs.
        by_rounding: whether different rounding on this machine can be the reason.
        here: the round as computed here; None if `round` is None.
        place: text that follows the round's number in the message, such as " (of rounds 1 to 9)"; may be "".
    """

    def __init__(
        self,
        faults: Sequence[object],
        round: int | None = None,
        here: RoundAgain | None = None,
        *,
        by_rounding: bool = False,
        place: str = "",
    ):
        super().__init__("not as recorded")
        self.faults, self.round, self.here = faults, round, here
        self.by_rounding, self.place = by_rounding, place


def verify(request: Verification, world: World, say: Callable[[str], None]) -> int:
    """Verify a run on all ranks; return the exit code. Arguments and errors are those of `judged`."""
    return judged(request, world, say).code


def judged(request: Verification, world: World, say: Callable[[str], None]) -> Verdict:
    """Verify a run on all ranks; return the verdict. `say` prints a line on rank 0.

    Raises:
        InputError: the run cannot be verified: no run folder, no data, or no version of the code as recorded.
        EnvironmentFailure: a file cannot be read, or a rank failed.
    """
    faults = list[Fault]()  # rank 0's

    def has_faults(findings: Iterator[Fault | str]) -> bool:
        for finding in [*findings]:
            if isinstance(finding, Fault):
                faults.append(finding)
            if len(faults) <= MOST_FAULTS or not isinstance(finding, Fault):
                say(str(finding))
        if len(faults) > MOST_FAULTS:
            say(f"and {counted(len(faults) - MOST_FAULTS, 'more fault')}: --json names them all")
        return bool(faults)

    run, watchdog = request.run.resolve(), Watchdog(world)
    with watchdog.watching():
        watchdog.stage("files and data")
        if world.on_root(lambda: has_faults(folder_faults(run, request.signers))):
            return _differs(say, faults)
        recipe = world.on_root(lambda: placed_recipe(run, request.data, request.code))
        if world.on_root(lambda: has_faults(data_faults(recipe, say))):
            return _differs(say, faults)
        found = world.on_root(lambda: recorded(run, recipe, request.permission))
        watchdog.limit = watchdog_limit(found.code[-1].recipe.watchdog)
        tables = list[RecordedTables]()  # rank 0's

        def contradicts_itself() -> bool:
            tables.append(RecordedTables(found))
            return has_faults(ending_faults(found, tables[0]))

        if world.on_root(contradicts_itself):
            return _differs(say, faults)
        for words in (*runs(found.code), *own_doubts(found.environment)):
            say(words)
        return Verifier(found, tables, request, world, watchdog, say).verdict()


def _differs(say: Callable[[str], None], faults: Sequence[object], total: int | None = None) -> Verdict:
    say("differs: this is not what the run left")
    return Verdict(DIFFERS, faults, total=total)


class Verifier:
    """Compares a recorded run's rounds and kept states with those that this machine computes.

    Args:
        run: the recorded run, whose files are as certified.
        tables: the run's `RecordedTables` on rank 0, in a list of one; empty on other ranks.
        request: the settings of the verification.
        world: all ranks.
        watchdog: watches the ranks for hangs.
        say: prints a line on rank 0.
    """

    def __init__(
        self,
        run: RecordedRun,
        tables: Sequence[RecordedTables],
        request: Verification,
        world: World,
        watchdog: Watchdog,
        say: Callable[[str], None],
    ):
        self._run, self._request, self._world, self._watchdog, self._say = run, request, world, watchdog, say
        self._every = request.rounds is None or request.rounds >= len(run.rows)
        self._tables = tables
        self._environment: Mapping[str, Any] = {}
        self._computed, self._measured = set[int](), set[int]()
        self._drawn, self._out_of_reach = list[int](), set[int]()
        self._notes = list[str]()
        self._unknown, self._absent, self._unscored = set[str](), set[str](), set[int]()
        self._remeasured = dict[tuple[str, str], int]()
        self._tolerance: float | None = None
        self._other_bits: _Differs | None = None
        self._of = ""
        self._worst = 0.0
        self._pace, self._last = Pace(), 0

    def verdict(self) -> Verdict:
        """Compare, print the verdict, and return it."""
        try:
            self._check(self._in_bits)
        except _Differs as difference:
            other = self._other_machine(difference.round) if difference.by_rounding else []
            if difference.by_rounding and not other:
                other = self._dependences(difference)
            if not other:
                return self._say_difference(difference)
            self._say(f"this machine computes other bits: {'; '.join(other)}")
            return self._within(difference)
        except Diverged as error:
            return self._say_divergence(error)
        return self._say_verdict()

    def _verdict(self, code: int, faults: Sequence[object] = (), round: int | None = None) -> Verdict:
        """Return a verdict on what has been checked so far."""
        near = self._tolerance is not None
        is_spot_check = not (self._every or near or self._out_of_reach) and code != DIFFERS
        return Verdict(
            code,
            faults,
            round,
            total=len(self._run.rows),
            computed=sorted(self._computed),
            drawn=[] if near else sorted(self._drawn),
            states=sorted(self._measured),
            not_checked=sorted(self._out_of_reach),
            chance_missed=self._chance_missed() if is_spot_check else None,
            tolerance=self._tolerance,
            largest=self._worst if near else None,
        )

    def _chance_missed(self) -> float:
        return max(0.0, 1 - len(self._drawn) / len(self._run.rows))

    def _check(self, check: Callable[[Again, CodeOfRounds], None]) -> None:
        """Call `check` for each version of the user's code that can run, then check the final models.

        Raises:
            _Differs: something is not as recorded.
        """
        before: RestoredState | None = None
        for one in self._run.code:
            if one.hindrance:
                self._out_of_reach |= {*range(one.first, one.last + 1)}
                self._notes.append(f"rounds {one.first} to {one.last} had other code: {one.hindrance}; {one.remedy}")
                before = None
                continue
            with Again(self._run, one, self._world, self._watchdog) as again:
                self._environment = again.environment
                self._check_facts(again)
                if before is not None and before.round == one.first - 1:
                    again.restore(before)
                check(again, one)
                if one is self._run.code[-1]:
                    self._check_end(again)
                else:
                    before = again.state()
        if self._run.code[-1].hindrance:
            self._notes.append("the last models are not measured: their code is not at hand")

    def _in_bits(self, again: Again, one: CodeOfRounds) -> None:
        """Evaluate kept states and train requested rounds of one version of the code; compare them bit for bit."""
        if self._every and again.round == one.first - 1:  # w⁰, or carried on
            self._begin(one.last - again.round)
            self._compute(again, one.last)
            return
        starts = self._check_states(again, one)
        if self._every:
            first = next((start for start in starts if start < one.last), None)
            self._out_of_reach |= {*range(one.first, one.last + 1 if first is None else first + 1)}
            if first is not None:
                self._enter(again, first)
                self._begin(one.last - first)
                self._compute(again, one.last)
            return
        assert self._request.rounds is not None
        count, total = self._request.rounds, len(self._run.rows)
        rounds = [*reachable(starts, one.last, total, count)]
        self._out_of_reach |= {*range(one.first, one.last + 1)} - {*rounds}
        if not rounds:
            return
        with Federation.open(one.recipe.data) as federation:
            cohorts = [self._row(round)["cohort"] for round in rounds]
            weights = oddness(cohorts, federation.sizes, one.recipe.local.batch_size)
        share = ceil(count * len(rounds) / total)
        evenly, odd = drawn(rounds, weights, share, self._request.seed)
        self._drawn += evenly
        parts = segments([*evenly, odd, rounds[-1]], starts)
        self._begin(sum(segment.stop - segment.start for segment in parts))
        for segment in parts:
            self._enter(again, segment.start)
            self._compute(again, segment.stop)

    def _check_states(self, again: Again, one: CodeOfRounds) -> list[int]:
        """Evaluate and compare one version's kept states; return the rounds of usable ones (0: initial model)."""
        starts = [0] if one.first == 1 else []
        for round in self._run.checkpoints:
            if not one.first - 1 <= round <= one.last or not self._enter(again, round):
                continue
            starts.append(round)
            if round >= one.first:
                self._compare(again.round, again.measured(self._due(round)), trained=False)
                self._measured.add(round)
                if self._pace.is_due():
                    self._say(f"the state after round {round} is as recorded")
        return starts

    def _enter(self, again: Again, round: int) -> bool:
        """Set the simulation to the state after a round; return False if it has other states than the recipe needs.

        Raises:
            _Differs: the checkpoint is damaged.
        """
        trouble = again.enter(round)
        if trouble and trouble != OTHER_STATES:
            raise _Differs([trouble])
        return not trouble

    def _compute(self, again: Again, last: int) -> None:
        """Train rounds up to `last`; compare each with its row of the record, and with its checkpoint if it has one."""
        first = again.round + 1
        while again.round < last:
            round = again.round + 1
            self._of = f" (of rounds {first} to {last})"
            self._compare(round, again.next(self._due(round)), trained=True)
            self._computed.add(round)
            if round in self._run.checkpoints and not again.is_as_kept():
                raise _Differs([Fault(f"the state kept after round {round}", "is another than is computed")])
            if self._pace.is_due():
                left = self._pace.left(len(self._computed), self._last)
                self._say(f"round {round} of {len(self._run.rows)} is as recorded{left}")

    def _begin(self, rounds: int) -> None:
        """Start the estimate of the time left for computing this number of rounds."""
        self._pace.begin(len(self._computed))
        self._last = len(self._computed) + rounds

    def _compare(self, round: int, here: RoundAgain, *, trained: bool) -> None:
        """Compare a computed round with its row of the record and its rows of the tables.

        Args:
            round: the round, from 1.
            here: the round as computed here.
            trained: whether the round was trained here; else only the state kept after it was evaluated.

        Raises:
            _Differs: the round differs from its rows in bits; or, if there is a tolerance, by more than that.
        """
        row = self._row(round)
        if not trained and row.get("hash") != here.row.get("hash", row.get("hash")):
            what = f"is not the one of the record, hash {here.row['hash']} and {row.get('hash')}"
            raise _Differs([Fault(f"the state kept after round {round}", what)])
        row, here = self._scored_alike(round, here)
        place = self._of if trained else ", measured from the model that is kept"
        found: Sequence[object] = from_record(row, here.row)
        tolerance = self._tolerance_of(round)
        if tolerance is not None:
            self._worst = max(self._worst, largest(row, here.row))
            found = beyond(row, here.row, tolerance)
        if found:
            raise _Differs(found, round, here, by_rounding=self._tolerance is None, place=place)
        faults = self._world.on_root(lambda: self._tables[0].faults(round, here, tolerance))
        if faults:
            by_rounding = self._tolerance is None and all(fault.part == CLIENTS for fault in faults)
            raise _Differs(faults, round, here, by_rounding=by_rounding, place=place)
        if trained:
            self._unknown |= not_computed(row, here.row)
        absent = lacking(row, here.row)
        if scores := {*filter(is_score, absent)}:
            self._unscored.add(round)
        self._absent |= absent - scores

    def _scored_alike(self, round: int, here: RoundAgain) -> tuple[Mapping[str, Any], RoundAgain]:
        """Return a round's row of the record and the computed round, both without scores that were measured otherwise.

        Those are noted.
        """
        row = self._row(round)
        of_all = self._run.measured_otherwise(round)
        of_clients = self._run.measured_otherwise(round, clients=True) if row.get("clients") is not None else ""
        for whose, how in (("scores", of_all), ("clients' scores", of_clients)):
            if how:
                self._remeasured[whose, how] = self._remeasured.get((whose, how), 0) + 1
        if not (of_all or of_clients):
            return row, here
        recorded, own = (
            {key: value for key, value in one.items() if not (is_score(key) if of_all else key == "clients")}
            for one in (row, here.row)
        )
        return recorded, replace(here, row=own, clients=None)

    def _check_facts(self, again: Again) -> None:
        for name, value in again.facts.items():
            if name in self._run.environment and self._run.environment[name] != value:
                raise _Differs([Fault("environment.json", f"{name}: {self._run.environment[name]}, here {value}")])

    def _check_end(self, again: Again) -> None:
        """Compare the model files with the state after the last round; evaluate them if that state is unknown here.

        A run that has not ended may have no model files.

        Raises:
            _Differs: a file has another model, or other scores than the last row.
        """
        last, left, has_ended = len(self._run.rows), again.left_files(), ended(self._run)
        if MODELS[0] not in left and not has_ended:
            return
        trained_here = again.round == last and self._tolerance is None  # else its bits are this machine's
        if (names := ", ".join(self._run.not_kept())) and not trained_here:
            self._notes.append(f"{names}: not kept here, nor computed to the bit: only the certified SHA-256 is known")
            return
        if not trained_here and last in self._run.checkpoints and self._enter(again, last):
            self._compare(last, again.measured(self._due(last)), trained=False)
        if again.round == last and (self._tolerance is None or last in self._run.checkpoints):
            rounded = self._tolerance is not None and self._run.recipe.evaluate.statistics == "training"
            found = [name for name in again.wrong_files(self._tolerance_of(1)) if has_ended or name in left]
            if wrong := [name for name in found if not (rounded and name == MODELS[1])]:
                raise _Differs([Fault(name, f"is not the model after round {last}") for name in wrong])
            if names:
                self._say(f"{names}: not kept here; computed again, with the certified SHA-256")
            if not (rounded and MODELS[1] in found):
                return
        elif MODELS[1] in left:
            self._notes.append(f"{MODELS[0]} is not measured: the state after round {last} is not kept")
        self._compare(last, again.measured_files(self._due(last)), trained=False)

    def _within(self, difference: _Differs) -> Verdict:
        """Compare the round after each kept state, and kept states' scores, within the tolerance; return the verdict.

        `difference` belongs to the first round with other bits. This round is compared, too: all earlier rounds were
        equal, so it began with the recorded state.
        """
        self._other_bits, self._of = difference, ""
        self._computed.clear()
        self._measured.clear()
        self._out_of_reach.clear()
        self._notes.clear()
        try:
            self._check(self._near)
        except _Differs as difference:
            return self._say_difference(difference)
        except Diverged as error:
            return self._say_divergence(error)
        if (self._run.folder / UPDATE_HASHES).is_file():
            self._notes.append(f"{UPDATE_HASHES} has the bits of the other machine: it is not checked")
        for note in self._notes:
            self._say(note)
        models = "the last models are not kept here" if self._run.not_kept() else "the last models as recorded"
        self._say(
            f"agrees within {self._tolerance:.2g}, not to the bit: {_named(sorted(self._computed))} of "
            f"{len(self._run.rows)}, each from its recorded state; at most {self._worst:.1e}; {self._kept()}{models}"
        )
        return self._verdict(IN_PART)

    def _near(self, again: Again, one: CodeOfRounds) -> None:
        """Compare one version's first round after each kept state, and the states' scores, within the tolerance."""
        if self._tolerance is None:
            start = next((round for round in (0, *self._run.checkpoints) if one.first - 1 <= round < one.last), None)
            self._tolerance = self._request.tolerance or self._measure_tolerance(again, start or 0)
        if self._other_bits is not None:
            first, self._other_bits = self._other_bits, None
            assert first.round is not None
            assert first.here is not None
            self._compare(first.round, first.here, trained=True)
            self._computed.add(first.round)
        for start in self._check_states(again, one):
            if start < one.last:
                self._enter(again, start)
                self._compare(start + 1, again.next(self._due(start + 1)), trained=True)
                self._computed.add(start + 1)

    def _measure_tolerance(self, again: Again, start: int) -> float:
        """Return `tolerance_from` the change of round `start + 1` if the last bits of its initial model change."""
        rows = []
        for perturbed in (False, True):
            self._enter(again, start)
            if perturbed:
                again.perturb()
            rows.append(again.next(self._due(start + 1)).row)
        return tolerance_from(largest(*rows), self._run.recipe.dtype)

    def _tolerance_of(self, round: int) -> float | None:
        """Return the tolerance for a round, by `of_drawn_model` for round 1; None if bits are compared."""
        if self._tolerance is None or round > 1 or self._request.tolerance:
            return self._tolerance
        return of_drawn_model(self._tolerance, self._run.recipe.dtype)

    def _row(self, round: int) -> Mapping[str, Any]:
        return self._run.rows[round - 1]

    def _due(self, round: int) -> tuple[bool, bool, bool]:
        """Return which scores a round's record has: of the test set, of training sets, and per client."""
        row = self._row(round)
        test, train = (any(row[key] is not None for key in row if key.startswith(part)) for part in ("test_", "train_"))
        in_table = self._world.on_root(lambda: self._tables[0].has_clients(round))
        return test or row.get("apart") is not None, train, row.get("clients") is not None or in_table

    def _other_machine(self, round: int | None) -> list[str]:
        """Return what differs here from the machine that computed a round, or the last one."""
        there = self._run.environment if round is None else environment_of(self._run.environment, round)
        return [*of_environments(there, self._environment)]

    def _dependences(self, difference: _Differs) -> list[str]:
        """Return a line on the differing round's first client whose update depends on its tile here; [] without one."""
        round = difference.round
        if round is None:
            return []
        return self._world.on_root(lambda: [str(found) for found in dependences_of(self._run, round)[:1]])

    def _say_divergence(self, error: Diverged) -> Verdict:
        self._say(f"differs: {error}")
        return self._verdict(DIFFERS, [error])

    def _say_difference(self, difference: _Differs) -> Verdict:
        if difference.round is None:
            for fault in difference.faults[:MAX_LISTED]:
                self._say(str(fault))
            return _differs(self._say, difference.faults, len(self._run.rows))
        if self._tolerance is None:
            self._say(f"differs from round {difference.round}{difference.place}")
        else:
            place = difference.place or ", from its recorded state"
            tolerance = self._tolerance_of(difference.round)
            self._say(f"differs in round {difference.round}, by more than {tolerance:.2g}{place}")
        for fault in difference.faults[:MAX_LISTED]:
            self._say(f"  {fault}")
        return self._verdict(DIFFERS, difference.faults, difference.round)

    def _say_verdict(self) -> Verdict:
        """Print what was verified; return the verdict."""
        total = len(self._run.rows)
        where = "on 1 rank" if self._world.size == 1 else f"on {self._world.size} ranks"
        in_table = self._world.on_root(lambda: {f"{CLIENTS}: {name}" for name in self._tables[0].unknown})
        if unknown := self._unknown | in_table:
            columns = ", ".join(sorted(unknown))
            self._notes.append(f"columns of the record that the recipe does not measure are not checked: {columns}")
        if self._absent:
            columns = ", ".join(sorted(self._absent))
            self._notes.append(f"computed rounds have values that the record lacks, which are not checked: {columns}")
        if self._unscored:
            count = counted(len(self._unscored), "computed round")
            self._notes.append(f"the record lacks scores of {count} that the recipe asks for")
        self._notes += [
            f"{whose} of {counted(count, 'round')} were measured with {how}: they are not checked"
            for (whose, how), count in self._remeasured.items()
        ]
        status = self._run.result.get("status", "unfinished")
        if ended(self._run) and status != "finished":
            self._notes.append(f"{RESULT} says {status}, though the last round and the models are there")
        elif status != "finished":
            self._notes.append(f"the run is not finished ({status}): {total} of {self._run.recipe.rounds} rounds")
        for note in self._notes:
            self._say(note)
        code = IN_PART if self._notes or self._out_of_reach else AGREES
        if self._out_of_reach:
            alone = f"{_spans(self._computed)} alone {'was' if len(self._computed) == 1 else 'were'} computed"
            alone = f"{alone}, bit for bit, {where}" if self._computed else "no round was computed"
            self._say(f"verified in part: {alone}; {self._kept()}the rest is only {self._trust()}")
        elif self._every:
            verified = "verified" if code == AGREES else "verified in part"
            self._say(f"{verified}: all {counted(total, 'round')}, bit for bit, {where}")
        else:
            computed = counted(len(self._computed), "round")
            self._say(f"{self._kept()}{computed} computed, the last one and those on the way to the drawn among them")
            checked = "spot-checked" if code == AGREES else "verified in part"
            start = "recorded states" if self._measured else "w⁰"
            which = f"{_named(self._drawn)} of {total}, from {start}, bit for bit, {where}"
            chance = below_one(self._chance_missed())
            self._say(f"{checked}: {which}; one wrong round is missed with a probability of {chance} at most")
        return self._verdict(code)

    def _kept(self) -> str:
        count = len(self._measured)
        return f"{count} kept state{'s' if count > 1 else ''} measured; " if count else ""

    def _trust(self) -> str:
        if (self._run.folder / SIGNATURE).is_file():
            return "signed"
        is_certified = (self._run.folder / CERTIFICATE).is_file()
        return "certified, without a signature" if is_certified else "what the folder says"


def below_one(probability: float) -> str:
    """Return a probability below 1 with two digits, or as many as it takes to tell it from 1."""
    return f"{probability:.{max(2, ceil(-log10(1 - probability)))}g}"


def _named(rounds: Sequence[int]) -> str:
    shown = ", ".join(map(str, rounds[:20])) + (", …" if len(rounds) > 20 else "")
    return f"round {shown}" if len(rounds) == 1 else f"{len(rounds)} rounds ({shown})"


def _spans(rounds: Collection[int]) -> str:
    """Return rounds as text, such as ``rounds 1–3 and 7``."""
    ordered = sorted(rounds)
    breaks = [0, *(n for n, (one, other) in enumerate(pairwise(ordered), start=1) if other > one + 1), len(ordered)]
    parts = [ordered[first:last] for first, last in pairwise(breaks)]
    words = [str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts]
    listed = " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return f"round{'' if len(ordered) == 1 else 's'} {listed}"


def check_count(rounds: int) -> None:
    """Check the number of rounds of a spot check.

    Raises:
        InputError: it is below 1.
    """
    if rounds < 1:
        raise InputError("--rounds", expected="at least 1", got=str(rounds), remedy="use --all for all of them")
