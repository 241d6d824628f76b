"""``hpcfed run`` as a command: the run folder and its rules, printed messages, and resolution of paths."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from ruamel.yaml import YAML
from safetensors.numpy import load_file

import hpcfed
from hpcfed.assembly import assemble, resolve
from hpcfed.assembly.remarks import remarks
from hpcfed.cohort import Cohorts
from hpcfed.config.load import dump_yaml, load_recipe, to_plain
from hpcfed.config.metrics import CLIENT_COLUMNS
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from hpcfed.lab.sweep.plan import make_plan
from hpcfed.ranks.world import World
from hpcfed.run_folder.folder import RunFolder
from hpcfed.run_folder.rounds import PHASES
from tests.federations import blobs, write_federation
from tests.launch import ROOT, Completed, launch, own_lines
from tests.mpi.recipes import small, write_recipe, write_small
from tests.numerics.test_reference import TOLERANCE, cases, flat, recipe_of

ROUNDS = 30
SLOW = """
def slow():
    import time
    print("on", flush=True)
    time.sleep(60)
"""
NUMBER, INTEGER = (float, int), int
ROW = {
    "round": INTEGER,
    "cohort": list,
    "local_loss": NUMBER,
    "test_loss": NUMBER,
    "test_accuracy": NUMBER,
    "train_loss": type(None),
    "train_accuracy": type(None),
    "clients": type(None),
    "skipped": list,
    "attempts": INTEGER,
    "unit": dict,
    "server_lr": NUMBER,
    "delta_sq": NUMBER,
    "mean_delta_sq": NUMBER,
    "params_up": INTEGER,
    "params_down": INTEGER,
    "bytes_up": INTEGER,
    "bytes_down": INTEGER,
    "gradients": INTEGER,
    "hash": str,
    "seconds": dict,
    "imbalance": NUMBER,
}
SHAPES = {"0.weight": (8, 12), "0.bias": (8,), "2.weight": (4, 8), "2.bias": (4,)}
SIZE = sum(np.prod(shape, dtype=int) for shape in SHAPES.values())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Completed]:
    """A run of 30 rounds on 2 ranks, started in its folder, and what it said."""
    folder = tmp_path_factory.mktemp("finished")
    write_small(folder)
    algorithm, evaluate = {"name": "fedexp"}, {"model": "last-two", "batch_size": 64}
    write_recipe(folder, rounds=ROUNDS, cohort={"size": 2}, algorithm=algorithm, evaluate=evaluate)
    return folder, launch(2, ["run", "recipe.yaml"], cwd=folder)


@pytest.fixture
def again(finished, tmp_path) -> Path:
    """A copy of the finished run's folder."""
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but its lock, by its path from there."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_run_ends_well(finished):
    assert (finished[1].returncode, finished[1].stderr) == (0, "")


def test_the_folder_holds_the_record_and_nothing_else(finished):
    record = {"recipe.yaml", "environment.json", "metrics.jsonl", "result.json", "certificate.json"}
    assert files(finished[0] / "run") == {
        *record, ".lock", "checkpoints", "model.safetensors", "model-evaluated.safetensors",
    }  # fmt: skip
    ending = json.loads((finished[0] / "run" / "result.json").read_text())
    assert (ending["status"], ending["rounds"], ending["message"]) == ("finished", ROUNDS, "")


def test_the_metrics_have_the_keys_and_types_of_the_contract(finished):
    rows = [json.loads(line) for line in (finished[0] / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(1, ROUNDS + 1))
    for row in rows:
        assert list(row) == list(ROW)
        wrong = {key: row[key] for key, kind in ROW.items() if not isinstance(row[key], kind)}
        assert not wrong
        checked = ("sentinel",) if row["round"] == 1 else ()
        assert set(row["seconds"]) == {*PHASES, "convert", "total", "cpu", *checked}
        assert len(set(row["cohort"])) == 2
        assert row["params_up"] == row["params_down"] == row["round"] * 2 * SIZE
        assert row["bytes_up"] == row["bytes_down"] == 4 * row["params_up"]
        assert row["gradients"] == row["round"] * 2 * 4
        assert len(bytes.fromhex(row["hash"])) == 8
        assert row["mean_delta_sq"] >= row["delta_sq"] > 0
        assert row["server_lr"] >= 1


def test_the_page_of_columns_has_those_of_the_record(finished):
    page = (ROOT / "docs" / "record.md").read_text(encoding="utf-8")
    rounds, clients = (
        re.findall(r"^\| `(\w+)` \|", part, flags=re.MULTILINE) for part in page.split("## `clients.csv`")
    )
    assert rounds == list(ROW)
    assert clients == [*CLIENT_COLUMNS]
    seconds = page.split("`seconds` has ")[1].split("## ")[0]
    row = json.loads((finished[0] / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert [name for name in re.findall(r"`(\w+)`", seconds) if name in row["seconds"]] == list(row["seconds"])


@pytest.mark.parametrize("name", ["model.safetensors", "model-evaluated.safetensors"])
def test_the_models_name_the_modules_parameters(finished, name):
    tensors = load_file(finished[0] / "run" / name)
    assert {key: tensor.shape for key, tensor in tensors.items()} == SHAPES
    assert all(tensor.dtype == np.float32 and np.isfinite(tensor).all() for tensor in tensors.values())


def test_the_evaluated_model_is_the_mean_of_the_last_two(finished, monkeypatch):
    monkeypatch.chdir(finished[0])
    before = hpcfed.run("recipe.yaml", [f"rounds={ROUNDS - 1}", "output=one-less"], quiet=True)
    last, previous, evaluated = (
        load_file(path)
        for path in (
            finished[0] / "run" / "model.safetensors",
            before.folder / "model.safetensors",
            finished[0] / "run" / "model-evaluated.safetensors",
        )
    )
    for name in SHAPES:
        np.testing.assert_allclose(evaluated[name], (last[name] + previous[name]) / 2, rtol=0, atol=1e-6)


def test_the_environment_names_what_the_bits_depend_on(finished):
    found = json.loads((finished[0] / "run" / "environment.json").read_text())
    assert found["ranks"] == len(found["hosts"]) == len(found["per_rank"]) == 2
    assert found["mpi"]
    assert found["packages"]["torch"]
    assert found["threads_per_rank"] == 1
    assert found["bitwise"] is True
    with Federation.open(finished[0] / "small.h5") as federation:
        assert found["evaluated_samples"] == {"test": federation.num_test, "train": federation.num_samples}


def test_progress_into_a_file_is_few_plain_lines(finished):
    room, evaluated, first, last, done = finished[1].stdout.splitlines()
    assert re.fullmatch(r"checkpoints: up to 23 of [\d.]+ \w+ in 2 files each, [\d.]+ [TGM]B free", room)
    assert evaluated.startswith("recipe: evaluated is the last-two model (evaluate.model, the default of fedexp)")
    for number, line in ((1, first), (ROUNDS, last)):
        assert re.match(rf"recipe: round {number}/{ROUNDS}  η_g [\d.]+  local loss [\d.]+  test loss", line)
        assert re.search(r"accuracy [\d.]+ %  [\d.]+ (rounds/s|s/round)  \d+:\d\d left$", line)
    assert f"{ROUNDS} rounds done" in done
    assert str(finished[0] / "run") in done
    assert "\x1b" not in finished[1].stdout


@pytest.mark.parametrize(
    ("cohort", "remark"),
    [
        ("{size: 2}", "cohorts of 2 for 3 ranks: at least 1 rank waits"),
        ("{fraction: 0.3, sampling: bernoulli}", "cohorts of about 1.8 for 3 ranks: at least 1.2 wait on average"),
        ("{size: 3}", ""),
    ],
)
def test_ranks_that_a_cohort_leaves_idle_are_reported(folder, cohort, remark):
    recipe = resolve(load_recipe(folder / "recipe.yaml", [f"cohort={cohort}", f"data={folder / 'small.h5'}"]))
    with Federation.open(recipe.data) as federation:
        assert Cohorts(recipe, federation.sizes).idle(3).startswith(remark or "")
        assert bool(Cohorts(recipe, federation.sizes).idle(3)) == bool(remark)


def test_clients_without_samples_are_counted_where_they_count(folder):
    """They make each step smaller where weights are uniform."""
    recipe = resolve(load_recipe(folder / "recipe.yaml", [f"data={folder / 'small.h5'}"]))
    found = {
        weights: Cohorts(recipe.model_copy(update={"weights": weights}), np.array([4, 0, 2])).without_samples
        for weights in ("samples", "uniform")
    }
    assert found == {"samples": 0, "uniform": 1}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cohort={schedule: [[0], [3]]}"], "1 client"),
        (["cohort={schedule: [[0]]}"], "2 clients"),
        (["cohort={schedule: [[0]], without: [1]}"], "1 client"),
        (["cohort={schedule: [[0]], without: {clients: [1, 3], evaluate: all}}"], ""),
        (["cohort={schedule: [[0], [1], [3]]}"], ""),
        (["cohort={schedule: [[0]]}", "loss.weights=null"], ""),
    ],
)
def test_weights_of_clients_that_never_take_part_are_reported(overrides, said, folder):
    """Client 2 has no samples."""
    given = blobs(4)
    given["clients"][2] = given["clients"][2][0][:0], given["clients"][2][1][:0]
    write_federation(folder / "four.h5", **given, content="four")
    usual = [f"data={folder / 'four.h5'}", "loss.weights=balanced"]
    recipe = resolve(load_recipe(folder / "recipe.yaml", [*usual, *overrides]))
    parts, _ = assemble(recipe, World())
    with parts.federation, parts.clients:
        found = [line for line in remarks(recipe, parts) if "in no round of cohort.schedule" in line]
    what = f"loss.weights: balanced: of all samples, also those of {said} in no round of cohort.schedule"
    assert found == [f"{what}; cohort.without leaves clients out"] * bool(said)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
@pytest.mark.parametrize(
    ("cohort", "trains"),
    [("{without: [0, 1]}", False), ("{schedule: [[2], [3]]}", False), ("{without: [0]}", True), ("null", True)],
)
def test_a_run_without_a_sample_to_train_on_is_reported(cohort, trains, algorithm, folder):
    """Clients 2 and 3 have no samples."""
    given = blobs(4)
    given["clients"][2:] = [(x[:0], y[:0]) for x, y in given["clients"][2:]]
    write_federation(folder / "four.h5", **given, content="four")
    changes = [f"data={folder / 'four.h5'}", f"cohort={cohort}", f"algorithm={algorithm}"]
    recipe = resolve(load_recipe(folder / "recipe.yaml", changes))
    parts, _ = assemble(recipe, World())
    with parts.federation, parts.clients:
        found = [line for line in remarks(recipe, parts) if "nothing is trained" in line]
    assert found == ["no client that takes part has samples: nothing is trained"] * (not trains)


@pytest.mark.one_mpi
def test_a_finished_run_without_its_model_is_not_called_finished(folder, command):
    words = ["run", "recipe.yaml", "rounds=1", "output=lost"]
    assert command(words, folder).returncode == 0
    (folder / "lost" / "model.safetensors").write_bytes(b"")
    again = command(words, folder)
    assert (again.returncode, "the model of this finished run was removed or damaged" in again.stderr) == (2, True)


@pytest.mark.soak
@pytest.mark.one_mpi
def test_a_run_says_at_its_start_that_ranks_are_idle(folder):
    done = launch(2, ["run", "recipe.yaml", "rounds=1", "cohort=1"], cwd=folder)
    assert "\nrecipe: cohorts of 1 for 2 ranks: at least 1 rank waits in each round; the result is the same\n" in (
        done.stdout
    )


@pytest.mark.soak
def test_slow_progress_is_reported_every_ten_seconds(folder):
    (folder / "slow.py").write_text(
        "import time\nfrom torch import nn\n\n\nclass Slow(nn.Linear):\n    def forward(self, x):\n"
        "        time.sleep(0.2 if self.training else 0)\n        return super().forward(x)\n"
    )
    model = {"factory": "slow:Slow", "args": {"in_features": 12, "out_features": 4}}
    write_recipe(folder, rounds=30, model=model, local={"steps": 1}, device="cpu")
    done = launch(1, ["run", "recipe.yaml"], cwd=folder)
    rounds = [int(number) for number in re.findall(r"round (\d+)/", done.stdout)]
    assert rounds[0] == 1
    assert rounds[-1] == 30
    assert 4 <= len(rounds) <= 5  # 30 rounds of a second: the first, the last, and two or three between


def test_the_resolved_recipe_runs_again_and_is_found_finished(finished, command):
    folder = finished[0]
    resolved = YAML(typ="safe").load(folder / "run" / "recipe.yaml")
    assert resolved["algorithm"] == {
        "name": "fedexp",
        "eps": 1e-3,
        "exact_projection": False,
        "eps_scale": "one",
        "eps_decay": 1.0,
    }
    assert resolved["weights"] == "samples"
    before = contents(folder / "run")
    done = command(["run", "run/recipe.yaml"], folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"recipe: finished already, see {folder / 'run'}\n"
    assert contents(folder / "run") == before


@pytest.mark.one_mpi
def test_a_rerun_of_the_resolved_recipe_has_the_same_bits(finished, tmp_path):
    result = hpcfed.run(finished[0] / "run" / "recipe.yaml", [f"output={tmp_path / 'rerun'}"], quiet=True)
    for name in ("model.safetensors", "model-evaluated.safetensors"):
        assert (result.folder / name).read_bytes() == (finished[0] / "run" / name).read_bytes()


@pytest.mark.one_mpi
def test_more_rounds_go_on_and_fewer_are_refused(again, monkeypatch):
    monkeypatch.chdir(again)
    old = contents(again / "run")
    with pytest.raises(hpcfed.InputError, match=f"rounds: expected at least {ROUNDS}, which are done, got 2"):
        hpcfed.run("recipe.yaml", ["rounds=2"], quiet=True)
    assert contents(again / "run") == old
    hpcfed.run("recipe.yaml", [f"rounds={ROUNDS + 2}"], quiet=True)
    record = (again / "run" / "metrics.jsonl").read_bytes()
    assert record.startswith(old["metrics.jsonl"])
    assert len(record.splitlines()) == ROUNDS + 2


@pytest.mark.one_mpi
def test_a_run_cut_short_without_a_checkpoint_starts_again_and_keeps_the_old_record(again, monkeypatch):
    monkeypatch.chdir(again)
    run = again / "run"
    shutil.rmtree(run / "checkpoints")
    (run / "result.json").unlink()
    (run / "model.safetensors").unlink()
    cut = (run / "metrics.jsonl").read_bytes()[:-20]
    (run / "metrics.jsonl").write_bytes(cut)
    pages = ("report.html", "figures/loss.png", "tables/results.csv")  # of `report`: they show the old record
    for name in pages:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(b"old")
    hpcfed.run("recipe.yaml", quiet=True)
    assert (run / "previous-1" / "metrics.jsonl").read_bytes() == cut
    for name in pages:
        assert (run / "previous-1" / name).read_bytes() == b"old"
        assert not (run / name).exists()
    assert json.loads((run / "result.json").read_text())["status"] == "finished"


@pytest.mark.one_mpi
def test_a_job_killed_while_it_wrote_its_recipe_starts_again(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "run").mkdir()
    for name in (".lock", ".recipe.yaml.77.tmp"):
        (folder / "run" / name).touch()
    result = hpcfed.run("recipe.yaml", quiet=True)
    assert len(result.metrics) == 3
    assert not list((folder / "run").glob(".*.tmp"))


@pytest.mark.one_mpi
@pytest.mark.parametrize("change", ["local.lr=0.3", "seed=1", "algorithm.eps=0.1", "cohort.size=3", "dtype=float64"])
def test_another_recipe_is_refused_with_the_difference(again, change, monkeypatch):
    monkeypatch.chdir(again)
    key, value = change.split("=")
    with pytest.raises(hpcfed.InputError, match=rf"{key}.* there and '?{value}'? here") as refused:
        hpcfed.run("recipe.yaml", [change], quiet=True)
    assert refused.value.exit_code == 2
    assert "run" in files(again)
    assert "previous-1" not in files(again / "run")


@pytest.mark.one_mpi
def test_a_run_of_the_last_model_has_no_other(folder, monkeypatch):
    monkeypatch.chdir(folder)
    result = hpcfed.run("recipe.yaml", ["rounds=1"], quiet=True)
    assert "model.safetensors" in files(result.folder)
    assert "model-evaluated.safetensors" not in files(result.folder)


@pytest.mark.one_mpi
def test_a_key_that_is_null_has_its_default(folder):
    """On the command line, where a key of the recipe cannot be left out."""
    stop = {"test_accuracy": 0.9}
    changed = {"cohort": {"size": 3}, "seed": 7, "loss": "cross-entropy", "parameters": {"buffers": "averaged"}}
    changed |= {"updates": ["sign"], "means": ["median"], "observers": ["wandb"], "guess": 3, "deterministic": False}
    changed |= {"evaluate": {"every": 2, "train": {"every": 2}}, "stop": stop, "checkpoint": {"every": 2}}
    path = write_recipe(folder, "changed.yaml", **changed)
    plain = load_recipe(write_recipe(folder, "plain.yaml", evaluate=None), ["name=changed"])
    assert load_recipe(path, [f"{key}=null" for key in changed]) == plain
    assert load_recipe(path, ["evaluate.train=null"]).evaluate.train.every == 0
    assert load_recipe(path, ["local.momentum=0.5", "local.lr_schedule=[{round: 2, lr: 1}]"]) != load_recipe(path)
    nulls = ["local.momentum=0.5", "local.momentum=null", "local.lr_schedule=null", "local.step_args=null"]
    assert load_recipe(path, nulls) == load_recipe(path)
    for key in ("local", "algorithm", "model"):
        with pytest.raises(InputError, match=f"{key}: expected a mapping of keys, got None"):
            load_recipe(path, [f"{key}=null"])


@pytest.mark.one_mpi
def test_overrides_are_yaml_and_win(folder, monkeypatch):
    monkeypatch.chdir(folder)
    changes = ["rounds=2", "local.lr=3e-2", "cohort={size: 2}", "evaluate.every=0", "rounds=1"]
    result = hpcfed.run("recipe.yaml", changes, quiet=True)
    assert (result.recipe.rounds, result.recipe.local.lr, result.recipe.cohort.size) == (1, 0.03, 2)
    assert len(result.metrics) == 1
    assert result.metrics[0]["test_loss"] is None


def test_overrides_reach_into_lists(folder):
    parts = [{"clip": {"norm": 1.0, "scales": {}}}, {"quantize": {"bits": 8}}]
    path = write_recipe(folder, updates=parts, model={"name": "mlp", "hidden": [8, 4]})
    recipe = load_recipe(path, ["updates.1.quantize.bits=4", "model.hidden.0=16", "updates.0={clip: {norm: 2.0}}"])
    assert to_plain(recipe)["updates"] == [{"clip": {"norm": 2.0}}, {"quantize": {"bits": 4}}]
    assert recipe.model.hidden == [16, 4]
    for override in ("updates.2.clip.norm=1", "updates.x=1", "updates.-1=1"):
        with pytest.raises(InputError, match=f"override '{override}': expected the number of an entry, 0 to 1"):
            load_recipe(path, [override])


@pytest.mark.one_mpi
def test_paths_lead_from_the_recipe_and_the_output_from_here(folder, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (folder / "cohorts.json").write_text("[[0], [3], [1]]")
    write_recipe(folder, "scheduled.yaml", cohort={"schedule": "cohorts.json"}, output=None)
    result = hpcfed.run(Path("..") / "scheduled.yaml", quiet=True)
    assert result.folder == elsewhere / "runs" / "scheduled"
    assert [row["cohort"] for row in result.metrics] == [[0], [3], [1]]


@pytest.mark.one_mpi
def test_variables_in_paths_expand(folder, monkeypatch):
    monkeypatch.setenv("HPCFED_TEST_DATA", str(folder))
    monkeypatch.chdir(Path("/"))
    changes = ["data=$HPCFED_TEST_DATA/small.h5", "output=${HPCFED_TEST_DATA}/by-variable", "rounds=1"]
    result = hpcfed.run(folder / "recipe.yaml", changes, quiet=True)
    assert result.folder == folder / "by-variable"
    assert result.recipe.data == folder / "small.h5"


def test_a_dollar_in_a_folders_name_is_no_variable(folder, monkeypatch):
    """Nor where a resolved recipe names the folder, nor in the value of a variable."""
    odd = folder.rename(folder.with_name("a$(b $HOME"))
    monkeypatch.setenv("HPCFED_TEST_DATA", str(odd))
    monkeypatch.chdir(odd)
    run = hpcfed.run("recipe.yaml", ["rounds=1", "data=$HPCFED_TEST_DATA/small.h5"], quiet=True).folder
    assert run == odd / "run"
    assert hpcfed.run(run / "recipe.yaml", quiet=True).metrics[0]["round"] == 1
    with pytest.raises(InputError, match=r"path new/\$HPCFED_TEST_NONE: expected every \$VARIABLE to be set"):
        hpcfed.run("recipe.yaml", ["output=new/$HPCFED_TEST_NONE"])


@pytest.mark.one_mpi
def test_quiet_says_nothing(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    hpcfed.run("recipe.yaml", ["rounds=1"], quiet=True)
    assert capfd.readouterr() == ("", "")


@pytest.mark.one_mpi
def test_a_run_says_at_its_start_that_there_is_no_test_set(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    samples = np.eye(12, dtype=np.float32), np.arange(12) % 4
    hpcfed.write_federation(tmp_path / "small.h5", {"a": samples})
    hpcfed.run(small("run", name="own", rounds=2, stop={"metric": "loss", "patience": 2}))
    said = capfd.readouterr().out
    assert "own: no test loss or accuracy, since the federation has no test set\n" in said
    assert "own: stop.patience has no effect: the federation has no test set\n" in said
    assert said.count("stop.patience") == 1  # not again for its number of evaluations


@pytest.mark.one_mpi
def test_a_python_without_mpi_runs_a_recipe(folder):
    program = f"""
import json, sys
sys.modules["mpi4py"] = None                      # what an interpreter without it does: the import raises
import hpcfed
result = hpcfed.run(json.loads({json.dumps(json.dumps(small("run")))}), quiet=True)
print(json.dumps([[row["round"] for row in result.metrics], len(list(result.module.parameters()))]))
assert not [name for name in sys.modules if name.startswith("mpi4py.")]
"""
    done = launch(0, [], program=("-c", program), cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [[1, 2, 3], 4]


def test_a_launcher_whose_ranks_lack_mpi_is_refused(folder):
    program = "import sys; sys.modules['mpi4py'] = None; from hpcfed.cli.main import main; main()"
    done = launch(2, ["run", "recipe.yaml"], program=("-c", program), cwd=folder)
    assert done.returncode == 4
    assert {*own_lines(done.stderr)} == {own_lines(done.stderr)[0]}
    assert "the launcher started 2 ranks, but MPI cannot be loaded" in done.stderr
    assert not (folder / "run").exists()


CASES = (
    "gel_rest+fednova/nk|softmax|partial",
    "fedavgcm/uniform|softmax|full",
    "scaffold_exp/nk|softmax|partial",
    "fedyogi/v0=tau2|softmax|partial",
    "fedexp_m/uniform|softmax|full",
    "feddyn_adaptive/alpha=1.0|softmax|partial",
)
"""One of each family; tests/numerics runs all of them in one process."""


@pytest.mark.soak
@pytest.mark.one_mpi
@pytest.mark.parametrize("name", [CASES[0], *(pytest.param(name, marks=pytest.mark.soak) for name in CASES[1:])])
def test_three_launched_ranks_agree_with_the_reference(name, softmax):
    case = next((param.values[0] for param in cases() if param.id == name), None)
    recipe = recipe_of(case, softmax, softmax / "run", 10)
    (softmax / "case.yaml").write_text(dump_yaml(json.loads(json.dumps(recipe, default=str))))
    done = launch(3, ["run", "case.yaml", "--quiet"], cwd=softmax)
    assert (done.returncode, done.stderr) == (0, "")
    found = flat(softmax / "run" / "model.safetensors")
    np.testing.assert_allclose(found, case["w"]["10"], rtol=0, atol=TOLERANCE)


def test_what_needs_no_ranks_works_in_the_shell_of_srun(folder, environment):
    """``srun --ntasks=4 --pty bash`` starts one of four tasks with a terminal: only what uses the ranks misses them."""
    shell = environment | {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    hpcfed = [sys.executable, "-m", "hpcfed"]

    def ends(*words: str, **variables: str) -> tuple[int, str]:
        done = subprocess.run(
            [*hpcfed, *words], env=shell | variables, cwd=folder, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stderr

    assert ends("--version") == ends("schema") == ends("prepare", "--list") == ends("inspect", "small.h5") == (0, "")
    assert ends("--version", PMI_RANK="0", PMI_SIZE="4") == (0, "")
    assert ends("prepare", "toy2d", "-o", "toy.h5") == (0, "")
    code, said = ends("inspect", "absent.h5")
    assert code == 2
    assert "absent.h5" in said
    code, said = ends("run", "recipe.yaml")
    assert code == 4
    assert "the launcher started 4 ranks, but MPI" in said

    # Of a rank's child, such as one by `subprocess`, the launcher's variables name a connection that it has not.
    shell = environment | {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "63"}
    assert ends("inspect", "small.h5") == (0, "")
    code, said = ends("run", "recipe.yaml")
    assert code == 4
    assert "PMI_FD=63 is no connection to it; this process is none of its ranks" in said
    # Open MPI's ranks may have it from the shell that called mpirun; a job of one task has no other ranks.
    code, said = ends("run", "recipe.yaml", PMIX_RANK="0")
    assert "PMI_FD" not in said
    assert ends("run", "recipe.yaml", "rounds=1", "-q", PMI_RANK="0", PMI_SIZE="1") == (0, "")


def test_a_loop_over_rounds_that_a_program_leaves_open_ends_with_a_checkpoint_and_no_word(folder):
    program = "import hpcfed; loop = hpcfed.rounds('recipe.yaml'); next(loop)"
    done = launch(0, [], program=("-c", program), cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    status = json.loads((folder / "run" / "result.json").read_text())
    assert (status["status"], status["rounds"]) == ("stopped", 1)


def test_a_run_whose_paths_no_recipe_could_name_does_not_begin(folder):
    """It would end, and neither go on, be verified nor reported: YAML has no bytes that are not UTF-8."""
    other = folder / os.fsdecode(b"caf\xe9")
    shutil.copytree(folder, other)
    for recipe, keys in ((other / "recipe.yaml", {}), (folder / "recipe.yaml", {"output": other})):
        with pytest.raises(InputError, match=r"path: expected a path in UTF-8, got .*caf\\udce9.*; rename the file or"):
            load_recipe(recipe, keys=keys)
    with pytest.raises(InputError, match="the sweep's folder: path: expected a path in UTF-8"):
        make_plan(folder / "recipe.yaml", [], [], [], other / "sweep")
    lock = RunFolder(other).held(World())
    with pytest.raises(InputError, match="output cannot be used: got a path not in UTF-8"):
        lock.__enter__()


def test_a_removed_working_folder_and_trailing_tabs(folder, environment):
    for words in ("run recipe.yaml", f"verify {folder}/run"):  # MKL ends a process that computes there
        (folder / "gone").mkdir()
        command = f"cd gone && rmdir ../gone && {sys.executable} -m hpcfed {words}"
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert own_lines(done.stderr)[-1] == "hpcfed: the working folder has been removed; change into another"
    text = (folder / "recipe.yaml").read_text()
    (folder / "tabs.yaml").write_text(text.replace("\n", "\t\n", 3) + " \t\n")
    one, other = (load_recipe(folder / f"{name}.yaml") for name in ("tabs", "recipe"))
    assert (one.data, one.model, one.local, one.rounds) == (other.data, other.model, other.local, other.rounds)
    (folder / "tabs.yaml").write_text(text.replace("\n  ", "\n\t", 1))
    with pytest.raises(InputError, match="found a tab; indent by spaces"):
        load_recipe(folder / "tabs.yaml")


def test_a_large_step_is_said(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for local, says in (
        ({"steps": 1, "batch_size": 4, "lr": 1000.0}, "local.lr: 1000 is a large step for sgd: most models diverge"),
        ({"steps": 1, "batch_size": 4, "lr": 1.0, "optimizer": "adam"}, "local.lr: 1 is a large step for adam"),
        (
            {"steps": 1, "batch_size": 4, "lr": 0.1, "weight_decay": 20.0},
            "local.lr times local.weight_decay is 2: each",
        ),
    ):
        write_recipe(folder, local=local)
        recipe = resolve(load_recipe(folder / "recipe.yaml"))
        parts, _ = assemble(recipe, World())
        with parts.federation, parts.clients:
            found = [line for line in remarks(recipe, parts) if line.startswith("local.lr")]
        assert len(found) == 1
        assert found[0].startswith(says)


@pytest.mark.parametrize(("where", "code", "said"), [("import slow", 130, "hpcfed: interrupted"), ("slow()", -2, "")])
def test_an_interrupt_during_an_import_ends_the_process(where, code, said, folder, environment):
    """By an exception there, torch's own imports end with SIGABRT; elsewhere it is Python's KeyboardInterrupt."""
    (folder / "slow.py").write_text("import time\nprint('on', flush=True)\ntime.sleep(60)\n")
    script = f"from hpcfed.ranks.early import interrupt_imports\ninterrupt_imports()\n{SLOW}\n{where}\n"
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment | {"PYTHONPATH": f"{folder}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's job may ignore it
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code
    assert error.strip() == said if said else "KeyboardInterrupt" in error
