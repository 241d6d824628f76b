"""What reads a run folder: reports, `watch`, `cite` and `hpcfed.load` its record, the next job its checkpoints."""

from __future__ import annotations

import io
import shutil
from contextlib import redirect_stdout, suppress
from pathlib import Path

import numpy as np
from rich.console import Console

import hpcfed
from hpcfed.cite import bibtex
from hpcfed.cli.report import print_table
from hpcfed.errors import InputError, Stopped
from hpcfed.report import compare, write_comparison
from hpcfed.watch.follow import Watch
from hpcfed.watch.view import plain, view
from tests.fuzz.mutations import mutated
from tests.mpi.recipes import small, write_small

READ = ("recipe.yaml", "metrics.jsonl", "result.json", "environment.json", "clients.csv", "model.safetensors")
PAGE_EVERY = 40
"""A page takes a second to draw."""


def _finished(folder: Path) -> Path:
    """Return a finished run with all files, and its checkpoints, made once."""
    run = folder / "sound"
    if not run.exists():
        evaluate = {"every": 1, "clients": {"every": 1}, "train": {"every": 1}}
        recipe = small(
            run, data=str(write_small(folder)), algorithm={"name": "feddyn", "alpha": 0.1}, evaluate=evaluate,
            checkpoint={"every": 1, "keep": 3},
        )  # fmt: skip
        hpcfed.run(recipe, quiet=True)
    return run


def _changed(folder: Path, seed: int, names: tuple[str, ...]) -> Path:
    """Return a copy of the finished run in which one of the files is damaged."""
    rng, run = np.random.default_rng([seed, 2]), folder / "run"
    shutil.copytree(_finished(folder), run)
    for _ in range(1 + int(rng.random() < 0.2)):
        path = run / names[int(rng.integers(len(names)))]
        what, content = mutated(
            path.read_bytes(), rng, is_text=path.suffix not in (".safetensors", ".server", ".clients")
        )
        path.write_bytes(content)
        print(f"    {what} in {path.name}", flush=True)
    return run


def record(folder: Path, seed: int) -> None:
    """Report on a damaged run in every way there is; each may refuse it."""
    run, screen = _changed(folder, seed, READ), Console(width=100, quiet=True)
    refusals = []
    for read in (_report, _watch, bibtex, _load):
        try:
            read(run) if read is not _watch else _watch(run, screen)
        except InputError as error:
            refusals.append(error)
    if seed % PAGE_EVERY == 0:
        with suppress(InputError):
            write_comparison(compare([run, folder / "sound"]), folder / "page", figures=False)
    shutil.rmtree(run)
    shutil.rmtree(folder / "page", ignore_errors=True)
    if refusals:
        raise refusals[0]


def _report(run: Path) -> None:
    comparison = compare([run, run.parent / "sound"])
    with redirect_stdout(io.StringIO()):
        for table in (*comparison.results, comparison.differences):
            if table is not None:
                print_table(table)


def _watch(run: Path, screen: Console) -> None:
    watch = Watch([run])
    watch.look()
    for one in watch.runs:
        plain(one)
    screen.print(view(watch.runs, 100, 40))


def _load(run: Path) -> None:
    loaded = hpcfed.load(run)
    loaded.metrics.describe()
    loaded.module.state_dict()


def checkpoint(folder: Path, seed: int) -> None:
    """Go on from damaged checkpoints: the model comes out as without them, or the run is refused."""
    sound = _finished(folder)
    names = tuple(str(path.relative_to(sound)) for path in sorted((sound / "checkpoints").iterdir()))
    run = _changed(folder, seed, names)
    (run / "result.json").unlink()
    wanted = (sound / "model.safetensors").read_bytes()
    try:
        hpcfed.run(run / "recipe.yaml", [f"output={run}"], quiet=True)
        assert (run / "model.safetensors").read_bytes() == wanted
    except Stopped:
        raise AssertionError("stopped") from None
    finally:
        shutil.rmtree(run)
