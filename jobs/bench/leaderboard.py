"""docs/leaderboard.md, and the records of finished runs that it is made from.

    python -m jobs.bench.leaderboard RUNS EXPERIMENT …     # RUNS: the --output of hpcfed reproduce
    make generated

Each finished run of the experiments in RUNS, with the experiment's own recipe, data and seeds, is written to
docs/leaderboard/EXPERIMENT/CASE.METHOD.SEED, without models and states (`hpcfed.provenance.slim`). ``make generated``
makes the page from these folders alone; means, intervals and verdicts are those of ``hpcfed reproduce --table``.
`--case` and `--method`, which are repeatable, choose runs.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcfed import algorithms, models
from hpcfed.config.load import load_recipe, to_plain
from hpcfed.config.recipe import Recipe
from hpcfed.errors import InputError, ends_in_a_line, first_of, nearest
from hpcfed.lab.report.measure import Criterion, Spread
from hpcfed.lab.report.read import Run, is_run_folder, read_run
from hpcfed.lab.report.text import criterion_text
from hpcfed.lab.reproduce.catalogue import experiments, find
from hpcfed.lab.reproduce.experiment import Case, Experiment
from hpcfed.lab.reproduce.inputs import Places, is_prepared
from hpcfed.lab.reproduce.measure import SettingRuns, by_case, criterion_of, left_out, read_settings
from hpcfed.lab.reproduce.plan import Setting, lay_out
from hpcfed.lab.reproduce.table import make_table
from hpcfed.lab.sweep.grid import points
from hpcfed.provenance.slim import write_slim
from hpcfed.run_folder.certificate import DIGITS, faults, not_kept, read_certificate
from hpcfed.run_folder.cut import MODELS
from hpcfed.run_folder.files import RECIPE
from hpcfed.run_folder.identity import FOLLOWED, WITHOUT_EFFECT, deciding

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "docs" / "leaderboard"
PLACES = Places(ROOT / "runs" / "reproduce")
"""Where `hpcfed reproduce` puts data and runs in a clone."""
FREE = ("checkpoint", "watchdog", *WITHOUT_EFFECT)
"""Keys of a recipe that decide no number of the page."""
CHOSEN = tuple(f"local.{key}" for key in FOLLOWED)
"""Keys that a run chooses where the experiment leaves them open."""
OF_DATA = ("data", "data_content")
AGAIN = "train it again, and remove this record"


def keep(
    root: Path, name: str, records: Path = RECORDS, cases: Sequence[str] = (), methods: Sequence[str] = ()
) -> Iterator[str]:
    """Write the records of an experiment's finished runs; yield a line for each run, and for what is left out.

    Raises:
        InputError: no such experiment, case or method, nothing of it in `root`, or another run's record is there.
    """
    (experiment,) = find(name)
    for kind, names, known in (("case", cases, experiment.cases), ("method", methods, experiment.methods)):
        for one in names:
            if one not in known:
                raise InputError(f"no {kind} {one!r}", where=name, remedy=nearest(one, [*known]))
    places, settings = Places(root.absolute()), list[SettingRuns]()
    for seed in experiment.seed_numbers:
        part = experiment.with_seeds([seed])
        if chosen := [case for case in cases or part.cases if is_prepared(part, case, places)]:
            part = part.limited(chosen)
            settings += read_settings(part, lay_out(part, "full", places, methods=methods))
    if not any(one.runs or one.others for one in settings):
        raise InputError("nothing has been run", where=str(root), expected=f"runs and data of {name}")
    for one in settings:
        for run in one.runs.values():
            if run.status != "finished" or run.num_rounds != one.setting.rounds:
                yield f"{run.folder.name}: {run.status}, {run.num_rounds} of {one.setting.rounds} rounds: not kept"
                continue
            folder = records / experiment.name / run.folder.name
            data = PLACES.output / "data" / Path(run.recipe["data"]).name
            certificate = write_slim(run.folder, folder, os.path.relpath(data, RECORDS / experiment.name / folder.name))
            size = sum(file.stat().st_size for file in folder.iterdir())
            yield f"{run.folder.name}: {size:,} bytes, chain {certificate['chain']}"
    if others := left_out(experiment, settings):
        yield others


def kept_settings(experiment: Experiment, records: Path) -> list[SettingRuns]:
    """Return the recorded runs of an experiment's settings, each as certified and of the experiment's recipe and data.

    Raises:
        InputError: a record differs from its certificate, or is of another recipe or other data.
    """
    (point,), found, contents = points([]), [], dict[str, tuple[str, Any]]()
    for name, case in experiment.cases.items():
        for method, entry in experiment.methods_of(case).items():
            seeds = experiment.seed_numbers
            folders = tuple(records / experiment.name / f"{name}.{method}.{seed}" for seed in seeds)
            rounds = experiment.recipe_of(case, method, "full")["rounds"]
            runs = {seed: read_run(folder) for seed, folder in enumerate(folders) if is_run_folder(folder)}
            for seed, run in runs.items():
                _check(run, experiment, case, method, seeds[seed])
                own = run.recipe.get("data_content")
                first, content = contents.setdefault(Path(run.recipe["data"]).name, (run.folder.name, own))
                if own is None or own != content:
                    expected = f"the content of {first}'s, {content}"
                    raise InputError("data", where=str(run.folder), expected=expected, got=str(own), remedy=AGAIN)
            found.append(SettingRuns(Setting(name, method, point, rounds, folders), entry.title, runs))
    return found


def _check(run: Run, experiment: Experiment, case: Case, method: str, seed: int) -> None:
    certificate = read_certificate(run.folder)
    wrong = ["no certificate"] if certificate is None else [str(fault) for fault in faults(run.folder, certificate)]
    wrong += [] if MODELS[0] in not_kept(run.folder) else [f"no SHA-256 of {MODELS[0]}"]
    wrong += [] if math.isfinite(run.column(criterion_of(experiment).column)[-1]) else ["no score of the last round"]
    recorded_recipe, data = load_recipe(run.folder / RECIPE), PLACES.federation(case.data, seed).name
    own = recorded_recipe.data.name
    seeds = {"model": seed, "cohort": seed, "batches": seed}
    whole = {**experiment.recipe_of(case, method, "full"), "name": run.recipe["name"], "data": data, "seed": seeds}
    asked = _with_defaults(load_recipe(whole))
    recorded = deciding(to_plain(recorded_recipe), (*FREE, *OF_DATA))
    free = {key for key in CHOSEN if asked.get(key) in (None, "auto")}
    keys = sorted((asked.keys() | recorded.keys()) - free)
    other = {key: asked.get(key) for key in keys if asked.get(key) != recorded.get(key)}
    wrong += [f"{key} {recorded.get(key)!r}, not {value!r}" for key, value in other.items()]
    wrong += [] if own == data else [f"data {own}, not {data}"]
    if wrong:
        raise InputError("not a run of the experiment", where=str(run.folder), got=first_of(wrong, 3), remedy=AGAIN)


def _with_defaults(recipe: Recipe) -> dict[str, Any]:
    """Return the deciding keys of an experiment's recipe, with the defaults that its runs record."""
    method, model = algorithms.build(recipe.algorithm, ()), models.spec(recipe.model)
    defaults = {f"algorithm.{key}": value for key, value in method.parameters().items()}
    defaults |= {f"model.{key}": value for key, value in (model.recorded() if model else {}).items()}
    defaults |= {"weights": recipe.weights or method.local.weights}
    return deciding(to_plain(recipe), (*FREE, *OF_DATA)) | defaults


def page(records: Path = RECORDS) -> str:
    """Return the page of all recorded runs.

    Raises:
        InputError: a record differs from its certificate, or is of another recipe or other data.
    """
    kept = [one for name, one in experiments().items() if (records / name).is_dir()]
    return "\n".join([HEAD, *(line for experiment in kept for line in _section(experiment, records))])


def _section(experiment: Experiment, records: Path) -> Iterator[str]:
    settings, criterion = kept_settings(experiment, records), criterion_of(experiment)
    there = {name: [one for one in of if one.runs] for name, (_, of) in by_case(experiment, settings).items()}
    yield f"## {experiment.title}\n"
    yield f"`hpcfed reproduce {experiment.name}`. {make_table(experiment, []).note}\n"
    if missing := [case.title for name, case in experiment.cases.items() if not there[name]]:
        yield f"Not here: {', '.join(missing)}.\n"
    for name, of_case in there.items():
        if not of_case:
            continue
        case = experiment.cases[name]
        yield f"### {case.title}\n"
        table = make_table(experiment.limited([name]), of_case)
        yield _table(table.header[1:], [row[1:] for row in table.rows])
        absent = [entry.title for key, entry in experiment.methods_of(case).items() if not _is_in(key, of_case)]
        if absent:
            yield f"Not here: {', '.join(absent)}.\n"
        yield _commands(experiment, case, name, of_case[0])
        yield _table(RUN_HEADER, [_row(run, criterion, records) for one in of_case for run in one.runs.values()])


def _is_in(method: str, settings: Sequence[SettingRuns]) -> bool:
    return any(one.setting.method == method for one in settings)


def _commands(experiment: Experiment, case: Case, name: str, one: SettingRuns) -> str:
    seed, run = next(iter(one.runs.items()))
    words = f"hpcfed reproduce {experiment.name} --case {name} --method {one.setting.method}"
    raw = " --raw DATA" if case.data.raw else ""
    number = experiment.seed_numbers[seed]
    return (
        f"```bash\n{words} --seeds {number}, --rounds 1{raw}    # makes the data of seed {number}\n"
        f"hpcfed verify docs/leaderboard/{experiment.name}/{run.folder.name} --all\n```\n"
    )


PLAIN = re.compile(r"[\w .,+()@:/-]{1,200}")
RUN_HEADER = ("Run", "Best", "Round", "Last", "Computed on", "Chain", "SHA-256 of the model")


def _row(run: Run, criterion: Criterion, records: Path) -> tuple[str, ...]:
    certificate = read_certificate(run.folder) or {}
    column = run.column(criterion.column)
    place = int(np.nanargmax(column if criterion.higher_is_better else -column))
    best, last = (criterion_text(Spread(float(column[at]), None, 1), criterion) for at in (place, -1))
    link = f"[`{run.folder.name}`](leaderboard/{run.folder.relative_to(records).as_posix()}/certificate.json)"
    digests = (certificate["chain"], not_kept(run.folder)[MODELS[0]])
    return (link, best, str(place + 1), last, _computed_on(run), *(f"`{digest[:DIGITS]}`" for digest in digests))


def _computed_on(run: Run) -> str:
    """Return a run's processor, instructions, torch and arithmetic.

    Raises:
        InputError: ``environment.json`` does not name them in plain text.
    """
    environment = run.environment
    try:
        facts = (environment["cpu"], environment["per_rank"][0]["instructions"])
        versions = (f"torch {environment['packages']['torch']}", f"arithmetic {environment['arithmetic']}")
        text = ", ".join([*facts, *versions])
    except (LookupError, TypeError):
        text = ""
    if not PLAIN.fullmatch(text):
        expected = "processor, instructions, torch and arithmetic in plain text"
        raise InputError("what computed the run", where=str(run.folder / "environment.json"), expected=expected)
    return text


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (header, ["---"] * len(header), *rows)
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in lines), ""])


HEAD = """# Leaderboard

Results of [NIID-Bench's experiments](reproduction-niid.md) that anyone can check. `make generated` makes this page from
the records in `docs/leaderboard`; no number is written by hand.

A folder there holds a run's recipe, the record of its rounds and its certificate, without paths, hosts and times.
Models are not kept: the certificate has their SHA-256.

## How to check a run

In a clone, two commands: the first makes the run's data and trains one round, the second computes all rounds again,
which takes as long as training did. Each case below has those of its first run.

- On a processor and torch like those of the run the last line is `verified: all 50 rounds, bit for bit`. The data,
  every number of the record and the model are then as certified.
- On others the last bits may differ. `verify` then compares little more than round 1, within a tolerance, and says so
  (exit code 5).
  Train anew then, by the first command without `--seeds` and `--rounds`, and compare its table with this one.
- `arithmetic` must be that of your version (`hpcfed/version.py`); else `verify` refuses the run.

The chain is one SHA-256 over recipe, data and all rounds: runs of the same chain have the same result. Its first 16
digits are shown here. [What a certificate proves](certificate.md) has what no check can show.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("names", nargs="+", metavar="EXPERIMENT")
    for choice in ("case", "method"):
        parser.add_argument(f"--{choice}", action="append", default=[])
    asked = parser.parse_args()
    with ends_in_a_line():
        for experiment in asked.names:
            for line in keep(asked.runs, experiment, cases=asked.case, methods=asked.method):
                print(line, flush=True)
