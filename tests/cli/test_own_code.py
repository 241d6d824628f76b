"""The user's own code: recorded, refused after edits, and its errors reported by file and line."""

from __future__ import annotations

import hashlib
import importlib
import json
import linecache
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import hpcfed
from hpcfed.config.load import dump_yaml
from hpcfed.config.user_code.modules import forget
from tests.federations import write_federation
from tests.launch import own_line
from tests.mpi.recipes import small, write_recipe, write_small

OWN = """
from hpcfed.algorithms.fedavg import Plain
from hpcfed.types import Method, Part, ServerUpdate


class Step(Part):
    def begin(self, w):
        return {}

    def step(self, w, state, means, context):
        from late import GAIN
        return ServerUpdate(w - GAIN * means.delta, state, GAIN)


def make():
    return Method("mine", Plain(), Step())
"""
CHANGES = {"algorithm": {"factory": "mine:make"}, "checkpoint": {"every": 1}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a method whose step imports another file of the user's in mid-run."""
    write_small(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "late.py").write_text("GAIN = 1.5\n")
    (tmp_path / "unrelated.py").write_text("raise SystemExit('nobody imports this')\n")
    write_recipe(tmp_path, **CHANGES)
    return tmp_path


def edit(folder: Path) -> None:
    """Change the step size without changing the file's length."""
    (folder / "late.py").write_text("GAIN = 0.5\n")


def gains(run: Path) -> list[float]:
    return [json.loads(line)["server_lr"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def recorded(run: Path) -> dict[str, Any]:
    return json.loads((run / "code.json").read_text())


def test_an_installed_packages_code_is_the_users_too(folder, command, monkeypatch):
    """Also beside a clone of it, a folder without ``__init__.py``; an error in it is named by its line."""
    packages = folder / "site-packages"
    (packages / "fedown").mkdir(parents=True)
    (folder / "fedown").mkdir()
    files = {"__init__.py": "", "methods.py": OWN.replace("late", "fedown.late"), "late.py": "GAIN = 1.5\n"}
    for name, text in files.items():
        (packages / "fedown" / name).write_text(text)
    monkeypatch.setattr(sys, "path", [str(packages), *sys.path])
    names = ["fedown", "fedown.late", "fedown.methods"]
    run = ["run", "recipe.yaml", "-q", "algorithm.factory=fedown.methods:make"]
    assert command(run, folder).returncode == 0
    assert sorted(recorded(folder / "run")["files"]) == names
    verify = ["verify", "run", "--all"]
    refused = command(verify, folder)
    assert (refused.returncode, "calls fedown.methods:make, which is installed here" in refused.stderr) == (2, True)
    assert command([*verify, "--run-code"], folder).returncode == 0
    (packages / "fedown" / "late.py").write_text("GAIN = 0.5\n")
    forget(names)  # as in another process
    done = command([*run, "rounds=5"], folder)
    assert (done.returncode, "fedown/late.py differs from line 1" in done.stderr) == (2, True)
    assert command([*verify, "--run-code"], folder).returncode == 0
    (packages / "fedown" / "late.py").write_text("GIAN = 0.5\n")
    forget(names)
    done = command([*run, "output=other"], folder)
    forget(names)
    line = 1 + files["methods.py"].splitlines().index("        from fedown.late import GAIN")
    assert (done.returncode, f"methods.py, line {line}, in step: ImportError" in done.stderr) == (2, True)


@pytest.mark.parametrize("rounds", [[], ["rounds=5"]], ids=["finished", "more-rounds"])
def test_edited_code_is_refused_by_its_files_name(folder, command, rounds):
    assert command(["run", "recipe.yaml", "-q"], folder).returncode == 0
    assert {name: entry["text"] for name, entry in recorded(folder / "run")["files"].items()} == {
        "late": "GAIN = 1.5\n",
        "mine": OWN,
    }
    (folder / "mine.py").touch()
    assert "finished already" in command(["run", "recipe.yaml"], folder).stdout
    edit(folder)
    before = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    done = command(["run", "recipe.yaml", *rounds], folder)
    assert done.returncode == 2
    assert "your code is another than this run's: late.py differs from line 1" in own_line(done.stderr)
    assert "--fresh" in done.stderr
    assert "--accept-code" in done.stderr
    assert {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()} == before


def test_accepted_code_goes_on_and_both_are_recorded(folder, command, monkeypatch):
    command(["run", "recipe.yaml", "-q"], folder)
    edit(folder)
    done = command(["run", "recipe.yaml", "rounds=5", "-q", "--accept-code"], folder)
    assert done.returncode == 0, done.stderr
    assert gains(folder / "run") == [1.5] * 3 + [0.5] * 2
    found = recorded(folder / "run")
    assert (found["since"], found["files"]["late"]["text"]) == (4, "GAIN = 0.5\n")
    (before,) = found["before"]
    assert (before["since"], before["files"]["late"]["text"]) == (1, "GAIN = 1.5\n")
    (folder / "late.py").write_text("GAIN = 2.5\n")  # of a finished run, too, which stays as certified
    certified = (folder / "run" / "code.json").read_bytes()
    for free in ([], ["watchdog=1h"]):
        assert command(["run", "recipe.yaml", "rounds=5", *free, "-q", "--accept-code"], folder).returncode == 0
        assert (folder / "run" / "code.json").read_bytes() == certified
    chained = json.loads((folder / "run" / "certificate.json").read_text())["code"]
    assert chained["late"] == hashlib.sha256(b"GAIN = 0.5\n").hexdigest()
    (folder / "other.py").write_text("")  # which other processes may have imported
    monkeypatch.syspath_prepend(folder)
    importlib.import_module("other")
    assert "finished already" in command(["run", "recipe.yaml", "rounds=5", "watchdog=1h"], folder).stdout
    (folder / "late.py").write_text("GAIN = 3.5\n")
    assert command(["run", "recipe.yaml", "rounds=5"], folder).returncode == 2  # that was not accepted
    (folder / "late.py").write_text("GAIN = 2.5\n")
    assert command(["run", "recipe.yaml", "rounds=6", "-q"], folder).returncode == 0
    assert (gains(folder / "run")[-1], recorded(folder / "run")["since"]) == (2.5, 6)
    assert not (folder / "run" / "accepted-code.json").exists()


def test_a_run_without_own_code_leaves_no_record_of_it(folder, command):
    write_recipe(folder, "plain.yaml", checkpoint={"every": 1})
    for rounds in (2, 3):
        assert command(["run", "plain.yaml", f"rounds={rounds}", "-q"], folder).returncode == 0
    assert not (folder / "run" / "code.json").exists()


def test_a_file_that_is_gone_is_accepted_once(folder, command):
    command(["run", "recipe.yaml", "-q"], folder)
    (folder / "mine.py").write_text(OWN.replace("from late import GAIN", "GAIN = 2.0"))
    (folder / "late.py").unlink()
    assert "late.py is gone" in own_line(command(["run", "recipe.yaml", "rounds=4"], folder).stderr)
    assert command(["run", "recipe.yaml", "rounds=4", "-q", "--accept-code"], folder).returncode == 0
    done = command(["run", "recipe.yaml", "rounds=5", "-q"], folder)
    assert done.returncode == 0, done.stderr
    assert gains(folder / "run") == [1.5] * 3 + [2.0] * 2


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "damage",
    ["[" * 100_000, '{"files": 1}', '{"files": {}, "since": "1", "before": []}',
     '{"files": {"mine": {"file": "mine.py", "path": "", "hash": ["a"], "text": null}}, "since": 1, "before": []}'],
)  # fmt: skip
def test_a_damaged_record_of_code_is_refused_in_one_line(folder, command, damage):
    command(["run", "recipe.yaml", "-q"], folder)
    (folder / "run" / "code.json").write_text(damage)
    for words in (["run", "recipe.yaml", "rounds=5"], ["report", "run", "--output", "page"]):
        done = command(words, folder)
        assert done.returncode == 2
        assert "code.json: not" in own_line(done.stderr)


def test_recorded_paths_are_read_only_if_they_are_files(folder, command):
    """Of a stranger's folder, they may name what never ends."""
    command(["run", "recipe.yaml", "-q"], folder)
    content = recorded(folder / "run")
    content["files"]["gone"] = {"file": "gone.py", "path": "/dev/zero", "hash": "ab", "text": ""}
    (folder / "run" / "code.json").write_text(json.dumps(content))
    done = command(["run", "recipe.yaml", "rounds=5"], folder)
    assert "gone.py is gone" in own_line(done.stderr)


def test_fresh_keeps_the_old_runs_and_what_is_not_ours(folder, command):
    command(["run", "recipe.yaml", "-q"], folder)
    edit(folder)
    (folder / "run" / "notes.txt").write_text("mine")
    kept = {path.name: path.read_bytes() for path in (folder / "run").iterdir() if path.is_file()}
    for number, changes in ((1, []), (2, ["local.lr=0.05"]), (3, ["rounds=2", "local.lr=0.05"])):
        done = command(["run", "recipe.yaml", *changes, "--fresh", "-q"], folder)
        assert done.returncode == 0, done.stderr
        assert (folder / "run" / f"previous-{number}" / "model.safetensors").is_file()
    assert gains(folder / "run") == [0.5] * 2
    assert (folder / "run" / "notes.txt").read_text() == "mine"
    first = folder / "run" / "previous-1"
    assert {path.name: path.read_bytes() for path in first.iterdir() if path.is_file()} == {
        name: content for name, content in kept.items() if name not in ("notes.txt", ".lock")
    }
    assert list((first / "checkpoints").iterdir())


def test_fresh_leaves_a_folder_that_is_no_runs_alone(folder, command):
    (folder / "run").mkdir()
    (folder / "run" / "thesis.tex").write_text("years of work")
    done = command(["run", "recipe.yaml", "--fresh"], folder)
    assert done.returncode == 2
    assert "files that are not a run's" in own_line(done.stderr)
    assert [path.name for path in (folder / "run").iterdir()] == ["thesis.tex"]


def test_fresh_is_once_for_a_job_of_slurm(folder, command, monkeypatch):
    """A job that goes back into the queue is the same command, in the same job."""
    command(["run", "recipe.yaml", "-q", "--fresh"], folder)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "finished already" in command(["run", "recipe.yaml", "--fresh"], folder).stdout


def test_a_typo_is_corrected_without_a_word(folder, command):
    """No round was done: nothing is mixed, and nothing lost."""
    (folder / "late.py").write_text("GAIN = 1.5j\nGAIN.raeal\n")
    failed = command(["run", "recipe.yaml", "-q"], folder)
    assert failed.returncode == 2
    assert "late.py, line 2, in <module>: AttributeError" in own_line(failed.stderr)
    edit(folder)
    assert command(["run", "recipe.yaml", "-q"], folder).returncode == 0
    assert recorded(folder / "run")["files"]["late"]["text"] == "GAIN = 0.5\n"


def test_a_run_without_a_checkpoint_starts_again_and_says_so(folder, command):
    (folder / "mine.py").write_text(
        OWN.replace("        from late", "        1 / (3 - means.round)\n        from late")
    )
    failed = command(["run", "recipe.yaml", "-q", "checkpoint.every=0"], folder)
    assert "mine.py, line 11, in step: ZeroDivisionError" in own_line(failed.stderr)
    (folder / "mine.py").write_text(OWN)
    done = command(["run", "recipe.yaml"], folder)
    assert done.returncode == 0, done.stderr
    assert "recipe: starts again, without a checkpoint, with other code: mine.py differs from line 11" in done.stdout
    assert (len(gains(folder / "run")), len(gains(folder / "run" / "previous-1"))) == (3, 2)


def test_a_folder_without_a_record_of_its_code_goes_on_with_a_word(folder, command):
    command(["run", "recipe.yaml", "-q"], folder)
    (folder / "run" / "code.json").unlink()
    edit(folder)
    done = command(["run", "recipe.yaml", "rounds=4"], folder)
    assert done.returncode == 0, done.stderr
    assert "no record of your code is here" in done.stdout
    assert recorded(folder / "run")["since"] == 4


@pytest.mark.soak
def test_a_patience_forgets_the_scores_of_other_code(folder, command):
    """The best score by the old code would end a run whose scores by the new one rise."""
    (folder / "score.py").write_text("def mine(z, y):\n    return 1000.0, 1\n")
    write_recipe(folder, evaluate={"every": 1, "metrics": {"mine": {"sum": "score:mine", "better": "higher"}}})
    asked = ["run", "recipe.yaml", "stop={metric: mine, patience: 2}", "-q"]
    assert command([*asked, "rounds=2"], folder).returncode == 0
    (folder / "score.py").write_text("def mine(z, y):\n    mine.n = getattr(mine, 'n', 0) + 1\n    return mine.n, 1\n")
    done = command([*asked, "rounds=6", "--accept-code"], folder)
    assert done.returncode == 0, done.stderr
    values = [json.loads(line)["test_mine"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert values[:2] == [1000.0] * 2
    assert len(values) == 6
    (folder / "score.py").write_text("def mine(z, y):\n    return 0.0, 1\n")
    assert command([*asked, "rounds=9", "--accept-code"], folder).returncode == 0
    (folder / "score.py").write_text("def mine(z, y):\n    mine.n = getattr(mine, 'n', 0) + 1\n    return mine.n, 1\n")
    done = command([*asked, "rounds=12", "--accept-code"], folder)  # the other code's patience had ended it
    assert done.returncode == 0, done.stderr
    assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 12


@pytest.mark.soak
def test_a_metric_that_is_new_to_a_finished_run_needs_more_rounds(folder, command):
    write_recipe(folder)
    command(["run", "recipe.yaml", "-q"], folder)
    (folder / "late.py").write_text("def mine(z, y):\n    return float(len(y)), len(y)\n")
    asked = ["run", "recipe.yaml", "evaluate.metrics={mine: 'late:mine'}"]
    done = command(asked, folder)
    assert done.returncode == 0, done.stderr
    assert "rounds are done; to measure anything else, raise rounds" in done.stdout
    assert "no record of your code" not in done.stdout  # it had none
    more = command([*asked, "rounds=20"], folder)
    assert "goes on after round" in more.stdout
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert "mine" not in lines[0]
    assert "mine" in lines[-1]


def test_an_observers_own_module_may_change(folder, command):
    """Observers change no result: their code and their names do not count."""
    (folder / "diary.py").write_text("class Diary:\n    def end(self, status):\n        pass\n")
    write_recipe(folder, **CHANGES, observers=[{"factory": "diary:Diary"}])
    assert command(["run", "recipe.yaml", "-q"], folder).returncode == 0
    assert set(recorded(folder / "run")["files"]) == {"mine", "late"}
    (folder / "diary.py").write_text("class Diary:\n    def round(self, row):\n        pass\n")
    assert "finished already" in command(["run", "recipe.yaml"], folder).stdout


@pytest.mark.soak
def test_a_sweep_does_not_mix_code(folder, command):
    sweep = ["sweep", "recipe.yaml", "-q", "--seeds", "2"]
    assert command([*sweep, "rounds=2"], folder).returncode == 0
    edit(folder)
    for more in (["rounds=2"], ["rounds=3"]):
        done = command([*sweep, *more], folder)
        assert done.returncode == 2
        assert "seed-0: your code is another than this run's: late.py" in own_line(done.stderr)
    runs = sorted((folder / "run-sweep" / "runs").rglob("seed-?"))
    assert len(runs) == 2
    for _ in range(2):  # the same command goes on: the second time nothing is left to do
        assert command([*sweep, "rounds=2", "--fresh"], folder).returncode == 0
        assert [gains(run) for run in runs] == [[0.5] * 2] * 2
        assert [gains(run / "previous-1") for run in runs] == [[1.5] * 2] * 2
        assert not (runs[0] / "previous-2").exists()
    (folder / "late.py").write_text("GAIN = 2.5\n")
    assert command([*sweep, "--accept-code", "rounds=3"], folder).returncode == 0
    assert [gains(run) for run in runs] == [[0.5, 0.5, 2.5]] * 2
    edit(folder)
    mixed = command(["sweep", "recipe.yaml", "--seeds", "3", "--accept-code", "rounds=3"], folder)
    assert mixed.returncode == 0, mixed.stderr
    assert "seeds of one configuration had different code" in mixed.stdout
    assert "late.py" in (folder / "run-sweep" / "results.csv").read_text()


@pytest.mark.soak
def test_configurations_of_different_code_are_reported(folder, command):
    sweep = ["sweep", "recipe.yaml", "rounds=2", "--accept-code"]
    assert command([*sweep, "--grid", "local.lr=0.1,0.2"], folder).returncode == 0
    edit(folder)
    mixed = " ".join(command([*sweep, "--grid", "local.lr=0.1,0.2,0.3"], folder).stdout.split())
    assert re.search(
        r"configurations had different code, late\.py [0-9a-f]{8} or [0-9a-f]{8}: scores of one are", mixed
    )
    assert "seeds of one configuration" not in mixed


@pytest.mark.soak
def test_an_experiment_does_not_mix_code(folder, command):
    experiment = {
        "paper": "fedexp",
        "name": "own",
        "title": "own",
        "shows": {},
        "cost": {"full": ""},
        "recipe": {"rounds": 2, "local": {"steps": 1, "batch_size": "full", "lr": 0.1}, "model": {"name": "quadratic"}},
        "cases": {"toy": {"title": "toy", "data": {"source": "toy2d"}, "targets": [0.1]}},
        "methods": {"mine": {"title": "mine", "recipe": {"algorithm": {"factory": "mine:make"}}}},
        "measure": {"kind": "final", "column": "local_loss"},
    }
    (folder / "own.yaml").write_text(dump_yaml(experiment))
    assert command(["reproduce", "own.yaml"], folder).returncode == 0
    edit(folder)
    done = command(["reproduce", "own.yaml"], folder)
    assert done.returncode == 2
    assert "late.py differs from line 1" in own_line(done.stderr)
    shown = command(["reproduce", "own.yaml", "--table"], folder).stdout
    assert "left out" in shown
    assert "other code: late.py differs from line 1" in " ".join(shown.split())
    assert command(["reproduce", "own.yaml", "--fresh"], folder).returncode == 0
    assert gains(folder / "runs/reproduce/own/sweep/runs/toy.mine.0") == [0.5] * 2


def test_python_runs_the_code_that_is_on_disk(folder, monkeypatch):
    """In one process, as in a notebook, where modules stay loaded: the edited file, another folder's file."""
    monkeypatch.chdir(folder)
    hpcfed.run("recipe.yaml", quiet=True)
    edit(folder)
    with pytest.raises(hpcfed.InputError, match=r"late\.py differs"):
        hpcfed.run("recipe.yaml", quiet=True)
    assert gains(hpcfed.run("recipe.yaml", quiet=True, fresh=True).folder) == [0.5] * 3
    other = Path(
        shutil.copytree(folder, folder / "other", ignore=shutil.ignore_patterns("run", "other", "__pycache__"))
    )
    (other / "late.py").write_text("GAIN = 0.1\n")
    assert gains(hpcfed.run(other / "recipe.yaml", ["output=other/run"], quiet=True).folder) == [0.1] * 3
    longer = hpcfed.run("recipe.yaml", ["rounds=4"], quiet=True)
    assert gains(longer.folder) == [0.5] * 4


MAKE = """
def rule():
    return ServerStep(server_lr=RATE)

def make():
    return Method("scaled", Plain(), rule())
"""


def test_a_module_of_two_runs_is_recorded_from_each_ones_folder(folder, monkeypatch):
    """The second run's folder lies in the first's, whose module is still loaded."""
    monkeypatch.chdir(folder)
    inner = folder / "inner"
    inner.mkdir()
    for name in ("named", "alone"):
        (inner / f"{name}.py").write_text(OWN.replace("from late import GAIN", "GAIN = 1.0"))
    for number, (place, method) in enumerate([(folder, "inner.named:make"), (inner, "alone:make")]):
        changes = {**CHANGES, "algorithm": {"factory": method}, "python_path": [str(place)]}
        run = hpcfed.run(small(f"run-{number}", **changes), quiet=True)
        assert hpcfed.replay(run.folder, 2, 1).agrees


FROM_ANOTHER = """
from torch import nn

import kinds.one


def model():
    return kinds.one.build()
"""
BY_NAME = """
import importlib


def model():
    return importlib.import_module("kinds.one").build()
"""
ALONE = """
from torch import nn


def model():
    from kinds import two
    return nn.Linear(12, 4)
"""


def test_a_run_records_what_its_own_recipe_imports_whatever_ran_before(folder, monkeypatch):
    """In one process, as in a notebook or a sweep; of code that finds modules by name all that are loaded."""
    monkeypatch.chdir(folder)
    texts = {"other": FROM_ANOTHER, "named": BY_NAME, "alone": ALONE, "kinds/one": "from .three import build\n"}
    texts |= {"kinds/__init__": "", "kinds/two": "", "kinds/three": "from torch import nn\n\n\n" + BUILD}
    (folder / "kinds").mkdir()
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    kinds = {"kinds", "kinds.one", "kinds.three"}
    expected = {"other": {"other"} | kinds, "alone": {"alone", "kinds", "kinds.two"}, "named": {"named"} | kinds}
    for again in range(2):
        for name in ("alone", "other", "alone", "named"):
            recipe = small(f"{name}-{again}", model={"factory": f"{name}:model"}, rounds=1)
            found = {*recorded(hpcfed.run(recipe, quiet=True, fresh=True).folder)["files"]}
            assert found == expected[name] if name != "named" else found > expected[name]
    (folder / "kinds" / "three.py").write_text(texts["kinds/three"] + "# edited\n")
    hpcfed.run(small("alone-0", model={"factory": "alone:model"}, rounds=2), quiet=True)
    with pytest.raises(hpcfed.InputError, match=r"kinds/three\.py differs"):
        hpcfed.run(small("other-0", model={"factory": "other:model"}, rounds=2), quiet=True)


BUILD = """
def build():
    return nn.Linear(12, 4)
"""


def test_a_notebooks_functions_are_recorded_by_their_source(folder, monkeypatch):
    """Cells are compiled and kept as IPython does it; the recipe names `make`, which uses `rule`, which uses `RATE`."""
    notebook = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    monkeypatch.chdir(folder)

    def cell(text: str) -> None:
        name = f"<ipython-input-{len(linecache.cache)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), vars(notebook))

    def run(**keywords: Any) -> list[float]:
        recipe = small(
            "run", algorithm={"factory": "__main__:make"}, checkpoint={"every": 1}, rounds=keywords.pop("to")
        )
        return gains(hpcfed.run(recipe, quiet=True, **keywords).folder)

    cell("from hpcfed.algorithms.fedavg import Plain, ServerStep\nfrom hpcfed.types import Method\nRATE = 1.5")
    cell(MAKE + "def unused():\n    return 0\n")
    assert run(to=2) == [1.5] * 2
    cell("def unused():\n    return 1\n")
    cell(MAKE)
    assert run(to=3) == [1.5] * 3
    for change in (MAKE.replace("RATE", "RATE / 3"), "RATE = 4.5"):
        cell(change)
        with pytest.raises(hpcfed.InputError, match=r"your code is another than this run's: __main__:make differs"):
            run(to=4)
    assert run(to=4, accept_code=True) == [1.5] * 4  # 4.5 / 3: what matters is the text
    assert run(to=1, fresh=True) == [1.5]
    assert recorded(folder / "run")["files"]["__main__:make"]["text"].count("RATE") == 2


PAIRS = """
def wrong(output, target):
    return (output - target).abs().sum(), len(target)


def right(output, target):
    return (output - target.unsqueeze(1)).abs().sum(), len(target)


def wrong_loss():
    return lambda output, target: (output - target).square().reshape(len(target), -1).mean(1)


def right_loss():
    return lambda output, target: (output.squeeze() - target).square()
"""


def test_outputs_of_one_number_are_not_paired_with_every_target(tmp_path):
    """Outputs (B, 1) less targets (B,) are (B, B), in silence."""
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(20, 3)), rng.normal(size=20)) for _ in range(2)]
    write_federation(tmp_path / "small.h5", data, test=data[0], content="numbers")
    (tmp_path / "pairs.py").write_text(PAIRS)
    place = {"data": str(tmp_path / "small.h5"), "python_path": [str(tmp_path)], "model": "linear", "rounds": 1}

    def run(loss: str, metric: str) -> hpcfed.Result:
        recipe = small(tmp_path / f"{loss}-{metric}", **place, loss={"factory": f"pairs:{loss}"})
        return hpcfed.run(recipe | {"evaluate": {"every": 1, "metrics": {"own": f"pairs:{metric}", "mae": "mae"}}})

    right = run("right_loss", "right").metrics[-1]
    assert right["test_own"] == pytest.approx(right["test_mae"])
    for loss, metric, key in (("wrong_loss", "right", "loss.factory"), ("right_loss", "wrong", "evaluate.metrics.own")):
        with pytest.raises(hpcfed.InputError, match=rf"{key}: four samples .* as if every output belonged to every"):
            run(loss, metric)


FAILING = """
from torch import nn


def building():
    raise ValueError("not built")


class Net(nn.Linear):
    def forward(self, x):
        if self.training:
            raise ValueError("not trained")
        return super().forward(x)


def training():
    return Net(12, 4)


def observer():
    raise ValueError("not seen")
"""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {"factory": "failing:building"}}, "not built"),
        ({"model": {"factory": "failing:training"}}, "not trained"),
        ({"observers": [{"factory": "failing:observer"}]}, "not seen"),
    ],
)
def test_an_error_closes_the_data(folder, monkeypatch, changes, says):
    """The error is held, as a notebook holds its last one, and its frames with it."""
    monkeypatch.chdir(folder)
    (folder / "failing.py").write_text(FAILING)
    with pytest.raises(hpcfed.InputError, match=says) as held:
        hpcfed.run(small("failed", **changes), quiet=True)
    with h5py.File("small.h5") as file:
        assert file.attrs["name"]
    assert held.tb is not None


def test_a_log_that_cannot_be_opened_hides_no_error(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "failing.py").write_text(FAILING)
    recipe = small("unlogged", model={"factory": "failing:training"}, on_bad_client="skip", rounds=1)
    (folder / "unlogged").mkdir()
    (folder / "unlogged" / "logs").write_text("no folder")
    with pytest.raises(hpcfed.errors.HpcfedError, match="training failed for every client"):
        hpcfed.run(recipe, quiet=True)


@pytest.fixture
def torch_settings():
    """Restores the settings of torch that a test's code changes."""
    dtype, threads, enabled = torch.get_default_dtype(), torch.get_num_threads(), torch.backends.mkldnn.enabled
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = enabled


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype .* got torch.float64; the recipe's dtype"),
        ("torch.set_num_threads(3)", "torch.set_num_threads .* expected 1, got 3; the recipe's threads decide"),
        ("torch.backends.mkldnn.enabled = False", "torch.backends.mkldnn.enabled .* got False; leave it on"),
    ],
)
@pytest.mark.parametrize("key", ["loss", "metric"])
def test_a_file_that_changes_the_settings_of_torch_is_refused(key, line, says, folder, monkeypatch, torch_settings):
    """A metric's file would give a built-in model other initial values, and a loss's other sums."""
    monkeypatch.chdir(folder)
    (folder / f"sets_{key}.py").write_text(f"import torch\n\n{line}\n\n\n{USED}")
    changes = {
        "loss": {"loss": {"factory": "sets_loss:loss"}},
        "metric": {"evaluate": {"every": 1, "metrics": {"m": "sets_metric:metric"}}},
    }
    monkeypatch.delitem(sys.modules, f"sets_{key}", raising=False)
    with pytest.raises(hpcfed.InputError, match=says):
        hpcfed.run(small("set", python_path=[str(folder)], **changes[key]), quiet=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": {"factory": "threads:loss"}},
        {"local": {"steps": 2, "batch_size": 5, "lr": 0.1, "step": "threads:step"}},
        {"evaluate": {"every": 1, "metrics": {"m": "threads:metric"}}},
    ],
)
def test_threads_that_are_set_in_a_round_are_refused(changes, folder, monkeypatch, torch_settings):
    monkeypatch.chdir(folder)
    (folder / "threads.py").write_text(THREADS)
    says = "client .*: code of yours sets torch's threads to 3, by which results differ; leave it to the recipe's"
    with pytest.raises(hpcfed.InputError, match=says):
        hpcfed.run(small("set", python_path=[str(folder)], **changes), quiet=True)


THREADS = """
import torch


def loss():
    def each(output, target):
        torch.set_num_threads(3)
        return torch.nn.functional.cross_entropy(output, target, reduction="none")

    return each


def step(parameters, batch, context):
    torch.set_num_threads(3)
    g, loss = context.gradient(parameters, batch)
    return parameters - context.lr * g, loss


def metric(output, target):
    torch.set_num_threads(3)
    return 1.0, 2.0
"""
USED = """
def loss():
    return lambda output, target: torch.nn.functional.cross_entropy(output, target, reduction="none")


def metric(output, target):
    return 1.0, 2.0
"""
