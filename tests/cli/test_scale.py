"""``hpcfed scale``: the fit recovers known costs, states its error, and marks predictions that nobody has verified."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from click.testing import CliRunner
from rich.console import Console

from hpcfed.assembly import resolve
from hpcfed.cli.scale import _check_fits, _measure, command
from hpcfed.config.load import load_recipe
from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.io.figure_style import panels
from hpcfed.lab.scaling.figure import SHEET, _time, draw
from hpcfed.lab.scaling.measure import RankTimes, Sample, measure_here, read
from hpcfed.lab.scaling.model import CostModel, bytes_of, fit, held_out_errors, network_of, reduced_bytes
from hpcfed.lab.scaling.network import Network, parse_network
from hpcfed.lab.scaling.plan import Load, StudySetting, load, settings
from hpcfed.lab.scaling.result import TOLERATED, study
from hpcfed.lab.scaling.tables import shown
from hpcfed.ranks.cpu import cores
from hpcfed.ranks.world import World
from tests.launch import HPCFED, HUNG, ROOT, launch
from tests.mpi.recipes import small

TRUTH = CostModel(fixed=2e-3, member=3e-6, sample=4e-6, latency=1.5e-6, byte=2e-10)
CORES = 16


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def made(ranks: int, truth: CostModel = TRUTH, **changes) -> RankTimes:
    """Measurements of a machine that follows the model exactly: two cohort sizes to fit, one held out."""
    samples = []
    for cohort, held_out in ((96, False), (24, False), (48, True)):
        sample = Sample(
            ranks=ranks,
            hosts=1,
            cores=CORES,
            cohort=cohort,
            held_out=held_out,
            load=Load(600.0 * -(-cohort // ranks), 600.0 * cohort / ranks, 1e-6 * ranks + 2e-7 * cohort**2),
            vector_bytes=1_400_000,
            client_bytes=40,
            rank_bytes=32,
            seconds={},
            imbalance=1.0,
        )
        sample = replace(sample, **changes)
        local = truth.fixed / 2 + truth.sample * sample.load.slowest
        total = truth.of(sample)
        reduce = truth.allreduce(ranks, bytes_of(sample))
        times = {"total": total, "local": local, "rest": total - local, "reduce": reduce}
        samples.append(replace(sample, seconds=times))
    probed = [(size, truth.allreduce(ranks, size)) for size in (8, 1 << 16, 1 << 23)] if ranks > 1 else []
    return RankTimes(ranks, {}, "strong", 20, {}, samples, probed)


def test_the_fit_finds_what_made_the_numbers() -> None:
    found = fit([made(ranks) for ranks in (1, 2, 4, 8)])
    for name in ("fixed", "member", "sample", "latency", "byte"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6), name


def test_an_allreduce_of_middle_size_by_another_algorithm_spoils_neither_end() -> None:
    """At 10 Mbit/s and 10 ms between two hosts, 64 KiB took 56 ms where the others' line has 84."""
    latency, byte = network_of([(2, 8, 0.032), (2, 65536, 0.0556), (2, 1048576, 0.864)])
    assert (latency, 8 / byte) == pytest.approx((0.016, 10.1e6), rel=0.01)


def test_what_was_left_out_is_predicted() -> None:
    told = held_out_errors([made(ranks) for ranks in (1, 2, 4, 8)])
    assert {entry.what for entry in told} == {
        "another cohort",
        "1 rank, by the others",
        *(f"{ranks} ranks, by the others" for ranks in (2, 4, 8)),
    }
    assert max(abs(entry.error) for entry in told) < 1e-6
    slower = [made(1), made(2), made(4, replace(TRUTH, sample=2 * TRUTH.sample))]
    assert max(abs(entry.error) for entry in held_out_errors(slower) if entry.ranks == 4) > 0.3


def test_one_rank_says_nothing_of_the_network() -> None:
    found = fit([made(1)])
    assert (found.latency, found.byte) == (0.0, 0.0)
    assert found.sample == pytest.approx(TRUTH.sample, rel=1e-6)


def test_no_parameter_is_negative() -> None:
    """A negative cost for a cohort member is fitted as 0."""
    found = fit([made(ranks, replace(TRUTH, member=-1e-6)) for ranks in (1, 2, 4)])
    assert found.member == 0.0
    assert found.fixed > 0


def test_ranks_that_shared_cores_are_not_fitted() -> None:
    crowded = made(4, replace(TRUTH, sample=9 * TRUTH.sample), cores=2)
    alone = [made(1), made(2)]
    assert fit([*alone, crowded]) == fit(alone)
    assert all(entry.ranks != 4 for entry in held_out_errors([*alone, crowded]))


def studied(**options):
    recipe = resolve(load_recipe("recipe.yaml", ["cohort.size=4"]))
    return study(recipe, "strong", [made(1), made(2)], np.full(5, 40), **options)


def test_predictions_beyond_one_host_are_doubted() -> None:
    told = studied(predict=(2, 4, 64, 4096), cohort=700, clients=5000)
    assert [row.note for row in told.predictions] == [
        "",
        "beyond the 2 ranks measured",
        "not verified on a network",
        "not verified on a network",
    ]
    assert [row.note for row in studied(predict=(2,), cohort=1000).predictions] == ["10 × the cohort measured"]
    assert [row.cohort for row in told.predictions] == [700] * 4
    assert told.clients == 5000
    fast, slow = told.predictions[2].modelled, told.predictions[0].modelled
    assert fast < slow / 6
    assert told.predictions[3].efficiency < told.predictions[2].efficiency < 1
    json.dumps(told.plain())


def test_nothing_is_predicted_from_a_fit_that_is_far_off(folder: Path) -> None:
    recipe = resolve(load_recipe("recipe.yaml", ["cohort.size=4"]))
    noisy = made(2, replace(TRUTH, sample=6 * TRUTH.sample))
    told = study(recipe, "strong", [made(1), noisy], np.full(5, 40), predict=(64, 4096))
    assert told.error > TOLERATED
    assert told.predictions == []
    assert [row.ranks for row in told.rows] == [1, 2]
    assert (
        "wrong on what it was not fitted to, and more than 30% is no basis; where nothing else runs, " in told.refused
    )
    assert "measure more rounds (--rounds 40" in told.refused
    busy = [replace(one, machine={"load": 9.5}) for one in (made(1), noisy)]
    said = study(recipe, "strong", busy, np.full(5, 40), predict=(64,)).refused
    assert "where nothing else runs, not at a load of 9.5 beside 1 rank, measure" in said
    short = [made(1, replace(TRUTH, sample=TRUTH.sample / 10)), noisy]
    wide = study(recipe, "strong", short, np.full(500, 40), predict=(64,)).refused
    assert re.search(r"100 ms are better than rounds of \d+ ms \(cohort\.size=\d+ --rounds 40 --output FOLDER\)$", wide)
    single = [replace(one, samples=one.samples[:1]) for one in (made(1), noisy)]
    assert "in a schedule's place" in study(recipe, "strong", single, np.full(5, 40), predict=(64,)).refused
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(shown(told))
    assert "nothing is predicted: the fit is" in console.export_text()
    assert draw(told)[".png"].startswith(b"\x89PNG")


@pytest.mark.parametrize("mode", ["strong", "weak"])
def test_times_that_are_close_have_numbers_beside_their_axis(folder: Path, mode: str) -> None:
    """Also without a power of ten among them."""
    recipe = resolve(load_recipe("recipe.yaml", ["cohort.size=4"]))
    figure, axes = panels(SHEET, 1, 1)
    _time(axes[0, 0], study(recipe, mode, [made(1), made(2)], np.full(5, 40)))
    figure.draw_without_rendering()
    low, high = axes[0, 0].get_ylim()
    shown_at = [tick.get_loc() for tick in axes[0, 0].yaxis.get_major_ticks() if tick.label1.get_text()]
    assert sum(low <= place <= high for place in shown_at) >= 2
    assert study(recipe, "strong", [made(4, cores=2)], np.full(5, 40), predict=(64,)).refused.startswith("every")
    assert studied(predict=(64,)).refused == studied().refused == ""


NETWORKS = {
    "20us,10Gbit/s": (20e-6, 0.8e-9),
    "1.5 ms, 100Mbit/s": (1.5e-3, 8e-8),
    "2µs,25GB/s": (2e-6, 4e-11),
}


@pytest.mark.parametrize("text", NETWORKS)
def test_a_network_is_given(text: str) -> None:
    found = parse_network(text)
    assert (found.latency, found.byte) == pytest.approx(NETWORKS[text])


@pytest.mark.parametrize(
    "text", ["fast", "1ms", "1ms,0Mbit/s", "--3ms,1Gbit/s", "1ms,2Gbps", "recipe.yaml", "1e999s,1B/s", "9" * 300]
)
def test_no_network(text: str) -> None:
    with pytest.raises(InputError, match="--network"):
        parse_network(text)


def test_a_network_that_doctor_measured(folder: Path) -> None:
    probed = [(size, TRUTH.allreduce(4, size)) for size in (8, 1 << 16, 1 << 24)]
    report = {"ranks": [{"host": f"n{rank // 2}"} for rank in range(4)], "measured": {"allreduce": probed}}
    (folder / "doctor.json").write_text(json.dumps(report))
    found = parse_network("doctor.json")
    assert (found.latency, found.byte) == pytest.approx((TRUTH.latency, TRUTH.byte))
    assert found.source == "measured by hpcfed doctor on 4 ranks of 2 hosts, doctor.json"
    (folder / "doctor.json").write_text(json.dumps(report | {"measured": None}))
    with pytest.raises(InputError, match="a report of hpcfed doctor"):
        parse_network("doctor.json")


def test_another_network_is_predicted_with_its_interval(folder: Path) -> None:
    """Measurements that are 10 % slower than the model on 4 ranks; the interval says so."""
    recipe = resolve(load_recipe(small(folder / "run"), ()))
    measured = [made(1), made(2), made(4, replace(TRUTH, sample=1.1 * TRUTH.sample, fixed=1.1 * TRUTH.fixed))]
    network = Network(1e-3, 1e-8, "given as 1ms,800Mbit/s")
    told = study(recipe, "strong", measured, np.array([600] * 96), [64], network=network)
    (row,) = told.predictions
    assert told.model is not None
    assert row.modelled is not None
    near = told.model.allreduce(64, 1_400_000 + 40 * 96 + 32 * 64)
    far = CostModel(0, 0, 0, 1e-3, 1e-8).allreduce(64, 1_400_000 + 40 * 96 + 32 * 64)
    (plain,) = study(recipe, "strong", measured, np.array([600] * 96), [64]).predictions
    assert row.modelled - (plain.modelled or 0) == pytest.approx(far - near, abs=5e-3)  # placing is measured each time
    assert row.interval is not None
    low, high = row.interval
    assert low <= row.modelled < high
    assert high / low - 1 > 0.05
    assert row.note == "another network than measured"
    text = io.StringIO()
    Console(file=text, width=160).print(shown(told))
    assert "from 6 settings fitted and 3 held out, 20 rounds each, on 1, 2, 4 ranks of 1 host" in text.getvalue()
    assert "network given as 1ms,800Mbit/s" in text.getvalue()


def test_more_ranks_than_cores_can_sensibly_hold_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    most = max(4 * len(cores()), 8)
    for nodes, allowed in ((None, most), ("3", 3 * most)):
        if nodes:
            monkeypatch.setenv("SLURM_JOB_NUM_NODES", nodes)
        _check_fits([1, allowed])
        with pytest.raises(InputError, match=rf"--ranks: expected at most {allowed} ranks .*, got {allowed + 1}"):
            _check_fits([1, allowed + 1])


def test_no_rank_trains_less_than_a_client() -> None:
    recipe = resolve(load_recipe("recipe.yaml"))
    one, many = (load(recipe, np.full(100, 40), ranks, 10) for ranks in (1, 1000))
    assert (one.slowest, many.slowest) == (10 * 4 * 10, 4 * 10)  # clients × steps × batch
    assert many.average == pytest.approx(0.4)


def test_states_that_move_are_predicted_as_moving() -> None:
    """``auto`` leaves stateful methods at home, ``balanced`` does not."""
    sizes = np.array([400, 10, 10, 10, 390, 20, 20, 20])
    changes = {"algorithm": {"name": "scaffold"}, "cohort": {"size": 3}, "local": {"epochs": 1, "batch_size": 10}}
    loads = {
        placement: load(load_recipe(small("run", placement=placement, **changes)), sizes, 2, None).slowest
        for placement in ("auto", "static", "balanced")
    }
    assert loads["auto"] == loads["static"] > loads["balanced"]


def test_what_is_measured_on_each_number_of_ranks() -> None:
    recipe = load_recipe("recipe.yaml", ["cohort.size=4"])
    assert settings(recipe, 100, "strong", 8) == [StudySetting(4), StudySetting(1), StudySetting(2, held_out=True)]
    assert settings(recipe, 100, "weak", 8) == [StudySetting(32), StudySetting(8), StudySetting(16, held_out=True)]
    assert settings(load_recipe("recipe.yaml", ["cohort.size=1"]), 100, "strong", 8) == [StudySetting(1)]
    with pytest.raises(InputError, match="at most the 100 clients, got 128 on 32 ranks"):
        settings(recipe, 100, "weak", 32)
    Path("cohorts.json").write_text("[[0, 1]]")
    scheduled = load_recipe("recipe.yaml", ["cohort={schedule: cohorts.json}"])
    assert settings(scheduled, 100, "strong", 8) == [StudySetting(None)]
    with pytest.raises(InputError, match="got a schedule"):
        settings(scheduled, 100, "weak", 8)


def test_clients_left_out_stay_out(folder: Path) -> None:
    """In the cohorts measured, in their names and in the predictions; those of other clients are other measurements."""
    for cohorts, sizes in (("redrawn", [4, 1, 2]), ("empty", [5, 2, 3])):
        without = f"cohort.without={{clients: [0], cohorts: {cohorts}}}"
        out = folder / cohorts
        found = measure_here(folder / "recipe.yaml", [without], "strong", 3, out, World())
        for size in sizes:
            rows = (out / "ranks-1" / f"cohort-{size}" / "metrics.jsonl").read_text().splitlines()
            drawn = [json.loads(row)["cohort"] for row in rows]
            assert all(0 not in cohort for cohort in drawn)
            assert cohorts == "empty" or all(len(cohort) == size for cohort in drawn)
        assert found.recipe["cohort"]["without"]["clients"] == [0]
        recipe = resolve(load_recipe("recipe.yaml", [without]))
        (row,) = study(recipe, "weak", [found], np.full(5, 60), [8]).predictions or [None]
        assert row is None or row.cohort == 8 * found.samples[0].cohort
    other = CliRunner().invoke(command, ["recipe.yaml", "--ranks=1", "--rounds=3", "--output=empty"])
    assert "choose another --output" in str(other.exception)


def test_the_times_of_an_allreduce_on_the_page_are_the_models(folder: Path) -> None:
    like = measure_here(folder / "recipe.yaml", ["cohort.size=2"], "strong", 1, folder / "out", World()).samples[0]
    assert (like.client_bytes, like.rank_bytes) == (56, 40)
    page = (ROOT / "docs" / "network.md").read_text(encoding="utf-8")
    section = page[page.index("By the model, not measured") : page.index("These are the Allreduce alone")]
    tables, num_rows = section.split("\n\nThe same for "), 0
    for table, cohort, on in zip(tables, (4096, 1024), ((64, 1024, 4096), (64, 256, 1024)), strict=True):
        for line in table.splitlines():
            if "bit/s, " not in line:
                continue
            name, network, *times = (cell.strip() for cell in line.strip("|").split("|"))
            if name:
                entries = int(name.rpartition(" ")[2].replace(",", ""))
                model_like = replace(like, vector_bytes=8 * 16 * -(-entries // 16))
            bandwidth, latency = network.split(", ")
            given = parse_network(f"{latency},{bandwidth}")
            model = TRUTH.on(given.latency, given.byte)
            modelled = [1000 * model.allreduce(ranks, reduced_bytes(model_like, ranks, cohort)) for ranks in on]
            assert [float(time.replace(",", "")) for time in times] == pytest.approx(modelled, rel=6e-3), line
            num_rows += 1
    assert num_rows == 24


def test_measurements_are_read_back_and_others_refused(folder: Path) -> None:
    found = measure_here(folder / "recipe.yaml", ["cohort.size=4"], "strong", 3, folder / "out", World())
    assert read(folder / "out", 1) == found
    assert [sample.cohort for sample in found.samples] == [4, 1, 2]
    assert found.samples[0].vector_bytes == 8 * (96 + 16 + 32 + 16)
    assert all(sample.seconds["total"] > sample.seconds["local"] > 0 for sample in found.samples)
    done = CliRunner().invoke(
        command, ["recipe.yaml", "cohort.size=4", "--ranks=1", "--rounds=3", "--output=out", "--predict=2,512"]
    )
    assert done.exit_code == 0, done.output
    assert "not verified on a network" in done.output or "nothing is predicted: the fit is" in done.output
    assert "measured in" not in done.output
    assert (folder / "out" / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "out" / "scaling.json").read_text())["rows"][0]["cohort"] == 4
    other = CliRunner().invoke(command, ["recipe.yaml", "cohort.size=3", "--ranks=1", "--rounds=3", "--output=out"])
    assert "choose another --output" in str(other.exception)
    (folder / "out" / "ranks-1.json").write_text('{"ranks": 1}')
    with pytest.raises(InputError, match="not a measurement"):
        read(folder / "out", 1)


def test_jobs_are_written_for_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "site.yaml").write_text("launch: srun --mpi=pmi2")
    size = ["--ranks=2,8", "--slurm", "--time=10", "--ranks-per-node=4", "--site=site.yaml", "--dry-run"]
    done = CliRunner().invoke(command, ["recipe.yaml", *size])
    assert done.exit_code == 0, done.output
    for line in (
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=2",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
    ):
        assert line in done.output
    assert "not measured yet: 2, 8 ranks" in done.output
    for wrong, message in (
        (["--slurm"], "expected --time"),
        (["--slurm", "--time=1", "--ranks=6", "--ranks-per-node=4", "--dry-run"], "divides 6 ranks"),
        (["--time=1", "--account=me"], "options of a job: expected --slurm beside them, got --time, --account"),
        (["--dry-run"], "expected --slurm beside them, got --dry-run"),
        (["--here", "--slurm", "--ranks=2"], "--here: expected measurements alone, got --ranks, --slurm"),
        (["--cohort=9", "--network=20us,10Gbit/s"], "expected --predict beside them, got --cohort, --network"),
    ):
        refused = CliRunner().invoke(command, ["recipe.yaml", *wrong])
        assert message in str(refused.exception)
    assert "--nodes" not in {name for option in command.params for name in option.opts}, "computed from --ranks"


def test_more_ranks_than_cores_can_bear_are_refused() -> None:
    for ranks in (99_999, 10**12):
        refused = CliRunner().invoke(command, ["recipe.yaml", f"--ranks={ranks}"])
        assert refused.exit_code != 0
        assert "at most" in f"{refused.exception} {refused.output}"
    assert (
        CliRunner().invoke(command, ["recipe.yaml", "--ranks=500", "--slurm", "--time=1", "--dry-run"]).exit_code == 0
    )


@pytest.mark.soak
def test_ranks_end_with_the_command(folder: Path, environment: dict[str, str]) -> None:
    words = ["scale", "recipe.yaml", "--ranks=2", "--rounds=1000000", "--output=out"]
    with subprocess.Popen([sys.executable, *HPCFED, *words], cwd=folder, env=environment) as job:
        until = time.monotonic() + HUNG
        while not list((folder / "out").glob("ranks-2/*/metrics.jsonl")) and time.monotonic() < until:
            time.sleep(0.05)
        started = psutil.Process(job.pid).children(recursive=True)
        job.send_signal(signal.SIGTERM)
        assert job.wait(HUNG) == 128 + signal.SIGTERM
    assert len(started) >= 3
    assert not [process for process in started if process.is_running()]


def test_a_measurement_that_is_not_there_is_not_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EnvironmentFailure, match="ended without a measurement"):
        _measure(["--version"], 1, folder / "out")
    assert capsys.readouterr().out == ""


@pytest.mark.soak
def test_it_measures_on_ranks_of_this_machine(folder: Path, environment: dict[str, str]) -> None:
    done = launch(0, ["scale", "recipe.yaml", "--ranks", "1,2", "--rounds", "3"], cwd=folder, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads((folder / "runs" / "recipe-strong" / "scaling.json").read_text())
    assert [row["ranks"] for row in told["rows"]] == [1, 2]
    models = [folder / "runs" / "recipe-strong" / f"ranks-{n}" / "cohort-5" / "model.safetensors" for n in (1, 2)]
    assert models[0].read_bytes() == models[1].read_bytes()
