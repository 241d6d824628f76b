"""Differences seed by seed and distributions over clients, against values worked out by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from hpcfed.errors import InputError
from hpcfed.lab.report.clients import Fairness, read_clients
from hpcfed.lab.report.comparison import compare
from hpcfed.lab.report.measure import core_hours
from hpcfed.lab.report.paired import difference, difference_curve, paired_differences, pairs, shared_draws, student
from hpcfed.lab.report.read import read_run
from hpcfed.lab.report.tables import clients_table, sites_table, timing_table
from tests.report.conftest import make_report, write_clients, write_run


def test_student_against_tables():
    expected = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 30: 2.0423, 1000: 1.9623}
    assert {freedom: round(student(freedom), 4) for freedom in expected} == expected


@pytest.fixture
def two_groups(accuracies):
    """FedAvg and FedProx (by recipe) of seeds 0 to 2, and of FedProx one seed that FedAvg lacks."""
    ends = {"fedavg": [0.50, 0.60, 0.70], "fedprox": [0.51, 0.62, 0.73, 0.99]}
    folders = [
        accuracies(f"{name}-{seed}", [0.1, 0.2 + seed / 10, value], seed, change={"algorithm": {"name": name}})
        for name, values in ends.items()
        for seed, value in enumerate(values)
    ]
    return compare(folders)


def test_runs_share_what_one_seed_draws(tmp_path):
    """A secret seed draws cohorts, too."""
    changes = {"one": {}, "two": {}, "secret": {"secret_commitment": "salt:one"}, "other": {"cohort": {"size": 2}}}
    runs = {name: read_run(write_run(tmp_path / name, change=change)) for name, change in changes.items()}
    assert shared_draws(runs["one"], runs["two"]) == "cohorts and batches"
    assert shared_draws(runs["one"], runs["secret"]) == shared_draws(runs["one"], runs["other"]) == ""


def test_runs_of_one_seed_are_paired(two_groups):
    paired = pairs(*two_groups.groups)
    assert [(ours.seed, theirs.seed) for ours, theirs in paired] == [("0", "0"), ("1", "1"), ("2", "2")]
    found = difference(paired, lambda run: run.column("test_accuracy")[-1])
    assert found.mean == pytest.approx(0.02)
    assert found.half_width == pytest.approx(4.302653 * 0.01 / math.sqrt(3))
    assert not found.is_clear
    rounds, mean, half = difference_curve(paired, "test_accuracy", 1)
    assert rounds.tolist() == [1, 2, 3]
    assert mean == pytest.approx([0, 0, 0.02])
    assert half == pytest.approx([0, 0, found.half_width])
    rounds, mean, _ = difference_curve(paired, "test_accuracy", 2)
    assert rounds.tolist() == [2, 3]
    assert mean == pytest.approx([0, 0.01])


def test_the_table_of_differences(two_groups):
    table = two_groups.differences
    assert table.title == "Difference from FedAvg"
    (row,) = table.rows
    assert row[:3] == ("FedProx", "0, 1, 2", "+2.00 [−0.48,\u00a0+4.48]")
    assert not table.strong


def test_differences_of_means_over_evaluations(two_groups):
    """Of the final ones, and of the rounds in which these means reach a target: one run's of three."""
    args = two_groups.groups, two_groups.baseline, two_groups.criterion, [0.56]
    for window, final, rounds in ((1, 0.02, 0.0), (2, 0.01, None)):
        (apart,) = paired_differences(*args, window)
        assert apart.final.mean == pytest.approx(final)
        assert (apart.rounds[0] and apart.rounds[0].mean) == rounds


@pytest.mark.parametrize(("several", "header"), [(False, "Seed"), (True, "Seeds")])
def test_a_seed_of_three_numbers_is_one_seed(several, header, accuracies):
    seeds = [f"batches 2, cohort 1, model {k}" for k in range(1 + several)]
    folders = []
    for name, rounds in (("ours", 2), ("theirs", 3)):
        for k, _ in enumerate(seeds):
            seed = {"model": k, "cohort": 1, "batches": 2}
            folders.append(accuracies(f"{name}-{k}", [0.5, 0.6], change={"name": name, "rounds": rounds, "seed": seed}))
    table = compare(folders, targets=[0.55]).differences
    assert (table.header[1], table.rows[0][1]) == (header, "; ".join(seeds))


@pytest.mark.every(3)
@pytest.mark.parametrize("measured", [(), ("run", "without"), ("without",)], ids=["unknown", "counted", "one"])
def test_scores_of_other_samples_have_no_difference(measured, accuracies, tmp_path, blank_pictures):
    """Those of a run without a client, whose test set it measures apart; all clients' or a common one's have."""
    run, every = accuracies("run", [0.5, 0.6]), accuracies("all", [0.5, 0.6], change=without("all"))
    other = accuracies("without", [0.5, 0.7], change=without("others"))
    common = accuracies("common", [0.5, 0.7], change={**without("others"), "rounds": 3})
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    rows = [{**row, "apart": {"1": {"loss": 0.3, "accuracy": 0.5, "auroc": None}}} for row in rows]
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = json.loads((other / "environment.json").read_text())
    (other / "environment.json").write_text(json.dumps({**facts, "without": {"clients": {"1": "Köln"}}}))
    for folder, values in ((run, [0.5, 0.6, 0.7]), (other, [0.5, 0.7])):
        if folder.name in measured:
            write_clients(folder, values)
    found = compare([run, other, every, common], targets=[0.55])
    rows_of = {row[0]: row[1:] for row in found.differences.rows}
    assert rows_of["without"] == ("0", "–", "–")
    assert rows_of["all"][1:] == ("+0.00", "0")
    assert rows_of["common"][1:] == ("+10.00", "0")
    theirs = "20 (without Köln)" if "without" in measured else "those of all clients but Köln"
    ours = "30" if "run" in measured else "those of all clients"
    remedy = "hpcfed without RUN --client NAME --evaluate all measures on the same ones"
    why = f"without has no difference: its test samples are {theirs}, the baseline's {ours}; {remedy}"
    assert why in found.differences.note
    of_all = "run, all, common" if "run" not in measured else "run" if len(measured) else ""
    note = found.results[0].note
    assert f"Test samples differ: {ours} for {of_all}" in note
    assert f"; {theirs} for without" in note
    assert "differ" not in compare([run, every, common], targets=[0.55]).results[0].note
    make_report([run, other], tmp_path / "report")
    assert why in (tmp_path / "report/report.html").read_text(encoding="utf-8").replace("&#39;", "'")
    assert not (tmp_path / "report/figures/difference-rounds.png").exists()


def test_numbers_of_other_test_samples_stand_under_the_results(accuracies):
    """Those of another data file: as the run recorded them, whoever measured clients."""
    folders = [accuracies(name, [0.5, 0.6], change={"rounds": k}) for k, name in enumerate(("few", "many", "unknown"))]
    for folder, count in zip(folders, (54, 7400), strict=False):
        facts = json.loads((folder / "environment.json").read_text())
        (folder / "environment.json").write_text(json.dumps({**facts, "evaluated_samples": {"test": count}}))
    note, best = "Test samples differ: 54 for few; 7,400 for many.", "Best is the best round on the test set itself"
    assert compare(folders[:2]).results[0].note == f"{best}, so it is optimistic. {note}"
    assert compare(folders[1:]).results[0].note == f"{best}, so it is optimistic."
    found = compare([folders[0], folders[0], folders[1]], window=2)
    assert found.results[0].note.startswith("Final and best: means of 2 evaluations in a row. Best is")
    assert found.results[0].note.endswith(note)
    assert found.differences.note == "many has no difference: its test samples are 7,400, the baseline's 54."


def test_a_row_of_dashes_says_which_record_lacks_the_values(accuracies):
    """Also if numbers of test samples differ, on which only one of the runs was scored."""
    folders = [accuracies(name, [0.5, 0.6], change={"rounds": k}) for k, name in enumerate(("scored", "plain"))]
    for folder, count in zip(folders, (54, 7400), strict=True):
        facts = json.loads((folder / "environment.json").read_text())
        (folder / "environment.json").write_text(json.dumps({**facts, "evaluated_samples": {"test": count}}))
    record = folders[1] / "metrics.jsonl"
    rows = [{**json.loads(line), "test_accuracy": None} for line in record.read_text().splitlines()]
    record.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for baseline, whose in (
        ("plain", "scored has no difference: the baseline's"),
        ("scored", "plain has no difference: its"),
    ):
        found = compare(folders, metric="accuracy", baseline=baseline, targets=[0.55])
        (row,) = found.differences.rows
        assert row[1:] == ("0", "–", "–")
        assert found.differences.note == f"{whose} record has no test accuracy."
        assert "differ" not in found.results[0].note


def test_clients_that_differ_stand_under_their_means(tmp_path):
    """In number, and whether values by client are of as many samples."""
    folders = [write_run(tmp_path / name, change={"rounds": k}) for k, name in enumerate(("all", "fewer", "more"))]
    for folder, clients, each in zip(folders, (3, 2, 3), (5, 5, 6), strict=True):
        lines = [f"2,{k},global,test,0.5,0.75,{each},site-{k}" for k in range(clients)]
        text = "\n".join(["round,client,model,split,loss,accuracy,n,name", *lines])
        (folder / "clients.csv").write_text(f"{text}\n", encoding="utf-8")
    assert "Clients differ: 3 for all; 2 for fewer." in clients_table(compare(folders[:2]).groups).note
    assert "Clients differ" not in clients_table(compare(folders[::2]).groups).note
    assert [row[1] for row in sites_table(compare(folders[::2]).groups).rows] == ["5 or 6"] * 3


def test_values_by_client_name_another_model_than_the_global_one(tmp_path):
    """Of a run that measured fine-tuned models alone, beside one of the global model."""
    folders = [write_run(tmp_path / name, change={"rounds": k}) for k, name in enumerate(("global", "fine-tuned"))]
    for folder in folders:
        text = f"round,client,model,split,loss,accuracy,n,name\n2,0,{folder.name},test,0.5,0.75,5,Chur\n"
        (folder / "clients.csv").write_text(text, encoding="utf-8")
    heads = sites_table(compare(folders).groups).header
    assert heads[2:4] == ("global: accuracy", "global: loss")
    assert heads[4:] == ("fine-tuned: accuracy, fine-tuned", "fine-tuned: loss, fine-tuned")


def without(evaluate: str) -> dict:
    """The recipe's ``cohort`` without client 1."""
    return {"cohort": {"size": 10, "without": {"clients": [1], "cohorts": "empty", "evaluate": evaluate}}}


def test_equal_differences_have_no_interval(two_groups):
    """Three of 359 more each time, whose shares differ by unequal last bits."""
    paired = pairs(*two_groups.groups)
    shares = {}
    for k, (ours, theirs) in zip((10, 100, 300), paired, strict=True):
        shares |= {id(ours): k / 359, id(theirs): (k + 3) / 359}
    assert len({shares[id(theirs)] - shares[id(ours)] for ours, theirs in paired}) > 1
    found = difference(paired, lambda run: shares[id(run)])
    assert (found.mean, found.half_width, found.is_clear) == (pytest.approx(3 / 359), None, False)


def test_a_seed_that_ran_twice_counts_once(accuracies):
    folders = [accuracies(name, [0.5] * rounds, 0) for name, rounds in (("a", 1), ("b", 2), ("b2", 2))]
    folders.append(accuracies("c", [0.5], 0, change={"algorithm": {"name": "fedprox"}}))
    comparison = compare(folders)
    assert [[run.folder.name for run in group.runs] for group in comparison.groups] == [["b"], ["c"]]
    assert [run.folder.name for run in comparison.groups[0].repeats] == ["a", "b2"]
    assert comparison.differences.rows[0][1] == "0"


def test_core_hours_are_ranks_times_threads_times_time(accuracies):
    run = read_run(accuracies("run", [0.5] * 10))
    assert core_hours([run, run]) == pytest.approx(2 * 2 * 1 * 10 * 0.26 / 3600)
    (row,) = timing_table(compare([run.folder]).groups).rows
    assert row[-2:] == ("2 × 1", "0.00144")
    imbalance = run.column("imbalance")
    assert row[-3] == f"{imbalance.mean():.2f} ({imbalance.max():.2f})"
    (run.folder / "environment.json").unlink()
    assert math.isnan(core_hours([read_run(run.folder)]))


def test_clients_of_the_last_round_and_of_their_test_sets(tmp_path):
    folder = write_run(tmp_path / "run")
    write_clients(folder, [0.5, 0.9, 0.7, 1.0])
    with (folder / "clients.csv").open("a") as file:
        file.write("3,0,global,te")  # being written
    clients = read_clients(folder / "clients.csv")
    assert (clients.round, clients.split, clients.measure) == (2, "test", "accuracy")
    assert clients.main.tolist() == [0.5, 0.9, 0.7, 1.0]
    (row,) = clients_table(compare([folder]).groups).rows
    assert row == ("FedAvg", "global", "test", "2", "77.50 %", "19.20 %", "50.00 %", "100.00 %")
    page = make_report([folder], figures=False).read_text(encoding="utf-8").replace("&#39;", "'")
    assert "accuracy of the global model" in page
    assert "on each client's test samples" in page


def test_clients_table_may_lack_columns_or_have_more(tmp_path):
    path = tmp_path / "clients.csv"
    assert read_clients(path) is None
    path.write_text("round,client,loss,accuracy,note\n4,0,2.0,,x\n4,1,3.0,,y\n")
    clients = read_clients(path)
    assert (clients.split, clients.measure, clients.main.tolist()) == ("all", "loss", [2.0, 3.0])
    path.write_text("round,client,loss\n4,0,2.0\n4,1,nan\n4,2,\n")
    clients = read_clients(path)
    np.testing.assert_array_equal(clients.main, [2.0, math.inf, math.nan])
    assert math.isnan(Fairness.of(clients.main, higher_is_better=False).mean)  # one is not finite
    assert Fairness.of(clients.main[::2], higher_is_better=False).mean == 2  # one is undefined
    path.write_text("round,client,loss\n")
    assert read_clients(path) is None
    path.write_text("round,client,loss\nfour,0,1\n")
    with pytest.raises(InputError, match="line 2: round"):
        read_clients(path)
    path.write_text("round,client,loss\n4,0,low\n")
    with pytest.raises(InputError, match="loss: expected numbers"):
        read_clients(path)


def test_tenths_are_rounded_up_and_follow_what_is_better(tmp_path):
    values = np.arange(11.0)
    assert Fairness.of(values, higher_is_better=True).worst_tenth == 0.5
    assert Fairness.of(values, higher_is_better=False).worst_tenth == 9.5
    assert Fairness.of(values, higher_is_better=True).std == pytest.approx(math.sqrt(10))
    folder = write_run(tmp_path / "losses")
    lines = [f"2,{client},global,test,{loss},,5" for client, loss in enumerate(values)]
    (folder / "clients.csv").write_text("\n".join(["round,client,model,split,loss,accuracy,n", *lines]) + "\n")
    (row,) = clients_table(compare([folder]).groups).rows
    assert row[4:] == ("5", "3.162", "9.5", "0.5")


def test_sites_have_rows_by_name_with_each_measure(tmp_path):
    """Over seeds; a value that is undefined at a site is left out, and a matrix has no column."""
    folders = [write_run(tmp_path / f"run-{seed}", seed=seed) for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        lines = [
            "round,client,model,split,loss,accuracy,n,name,auroc,confusion-matrix",
            f'2,0,global,test,0.5,{0.5 + 0.2 * seed},10,"Bern, city",{0.25 + 0.5 * seed},"[[1, 2], [3, 4]]"',
            '2,1,global,test,0.5,0.75,5,Chur,,"[[5, 0], [0, 0]]"',
        ]
        (folder / "clients.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    table = sites_table(compare(folders).groups)
    assert table.header == ("Client", "Samples", "accuracy", "loss", "auroc")
    assert table.rows == (
        ("Bern, city", "10", "60.00 ± 14.14 %", "0.5", "0.5 ± 0.3536"),
        ("Chur", "5", "75.00 %", "0.5", "–"),
    )
    page = make_report(folders, tmp_path / "report", figures=False).read_text()
    assert "Clients by name" in page
    assert "Bern, city" in page
