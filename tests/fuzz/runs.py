"""What reads a run folder: reports, `watch`, `cite` and `hpcfed.load` its record, the next job its checkpoints."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stdout, suppress
from pathlib import Path

import numpy as np
from rich.console import Console

import hpcfed
from hpcfed.cli.report import print_table
from hpcfed.config.load import load_recipe
from hpcfed.errors import InputError, Stopped
from hpcfed.lab.cite import bibtex
from hpcfed.lab.report.comparison import compare, write_comparison
from hpcfed.lab.report.read import read_code
from hpcfed.lab.sweep.claims import Claims, RunState
from hpcfed.lab.watch.follow import Watch
from hpcfed.lab.watch.view import plain, view
from hpcfed.run_folder.checkpoint.layout import _digest
from hpcfed.run_folder.folder import RunFolder
from tests.fuzz.mutations import mutated
from tests.mpi.recipes import small, write_small

METHOD = """
from hpcfed.algorithms.fedavg import LOCAL, SERVER
from hpcfed.types import Method


def method():
    return Method("mine", LOCAL(), SERVER())
"""
OTHERS = (None, "", "a", -1, 0, 10**9, 1 << 62, 0.5, 1e308, [], {}, [1, 2], {"a": 1}, [[0]], True)
NUMBERS = ("a.²", "a.٣", "a.0", "a.-1", f"a.{'9' * 200}", "a.1.1", ".1", "a.\n.2", "b.99999999999999999999")
READ = ("recipe.yaml", "metrics.jsonl", "result.json", "environment.json", "clients.csv", "model.safetensors")
PAGE_EVERY = 200
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
    assert len(loaded.metrics.dtypes)
    assert loaded.clients is not None
    loaded.module.state_dict()


def checkpoint(folder: Path, seed: int) -> None:
    """Go on from damaged checkpoints: the model comes out as without them, or the run is refused."""
    sound = _finished(folder)
    names = tuple(str(path.relative_to(sound)) for path in sorted((sound / "checkpoints").iterdir()))
    run = _changed(folder, seed, names)
    (run / "result.json").unlink()
    wanted = (sound / "model.safetensors").read_bytes()
    forged = seed % 4 == 0 and _forge(run / "checkpoints" / "round-00000003.json", seed)
    try:
        hpcfed.run(run / "recipe.yaml", [f"output={run}"], quiet=True)
        assert forged or (run / "model.safetensors").read_bytes() == wanted
    except Stopped:
        raise AssertionError("stopped") from None
    finally:
        shutil.rmtree(run)


def _forge(manifest: Path, seed: int) -> bool:
    """Change a value of a manifest, and its checksum, as damage would not; return whether it could be done."""
    rng = np.random.default_rng([seed, 4])
    try:
        content = json.loads(manifest.read_bytes())
        place = content
        while isinstance(place, dict) and place and (place is content or rng.random() < 0.8):
            above, key = place, str(rng.choice(sorted(place)))
            place = above[key]
        above[key] = OTHERS[int(rng.integers(len(OTHERS)))]
        if rng.random() < 0.2:
            del above[key]
        content.pop("checksum", None)
        manifest.write_text(json.dumps({**content, "checksum": _digest(content)}))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return False
    print(f"    forged: {key}", flush=True)
    return True


def claim(folder: Path, seed: int) -> None:
    """Look at damaged claims of a sweep."""
    rng, name = np.random.default_rng([seed, 5]), "a"
    claims = Claims(folder, "before")
    for number in range(1, 4):
        claims.take(name, "digest", RunState(last=number - 1))
        if number < 3:
            claims.end(name, number, ("stopped", "failed")[number - 1], "said")
    path = folder / "claims" / f"{name}.{rng.integers(1, 4)}"
    what, content = mutated(path.read_bytes(), rng, is_text=True)
    path.write_bytes(content)
    if rng.random() < 0.2:
        path.rename(path.with_name(NUMBERS[int(rng.integers(len(NUMBERS)))]))
    print(f"    {what} in {path.name}", flush=True)
    try:
        states = Claims(folder, "now").look([(name, "digest"), ("b", "digest")])
        assert states["b"].open
        if states[name].open:
            Claims(folder, "now").take(name, "digest", states[name])
    finally:
        shutil.rmtree(folder / "claims")


def _with_code(folder: Path) -> Path:
    """Return a finished run of a method of the user, made once."""
    run = folder / "own"
    if not run.exists():
        (folder / "own_method.py").write_text(METHOD)
        source = small(run, data=str(write_small(folder)), algorithm={"factory": "own_method:method"})
        hpcfed.run({**source, "python_path": [str(folder)]}, quiet=True)
    return run


def code(folder: Path, seed: int) -> None:
    """Compare a damaged record of the user's code with the code, and go on with it."""
    run, rng = _with_code(folder), np.random.default_rng([seed, 3])
    recipe, path = load_recipe(run / "recipe.yaml"), run / "code.json"
    content = path.read_bytes()
    what, damaged = mutated(content, rng, is_text=True)
    print(f"    {what}", flush=True)
    path.write_bytes(damaged)
    try:
        there = RunFolder(run)
        there.code_remark(recipe)
        read_code(path)
        there.code.write(recipe, 3)
        assert not there.code.changes(recipe)
        there.check_code(recipe)
    finally:
        path.write_bytes(content)
