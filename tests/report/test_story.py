"""A consortium's question, from the recipes to the page: is it worth to train together? Runs with names of the user's,
on splits of one data set (together, pooled, a site alone), a method of the user's own, a sweep, a baseline.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import hpcfed
from hpcfed.cli.report import command
from tests.contract.test_add_a_method import block
from tests.federations import blobs, write_federation
from tests.launch import ROOT, launch
from tests.mpi.recipes import small, write_recipe
from tests.report.conftest import make_report
from tests.soak import often

pytestmark = pytest.mark.one_mpi
OWN = {"factory": "grads:fedexprox", "mu": 0.1}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A folder with ``runs/``: pooled, federated (also by the user's method), one site, two seeds each; and a sweep."""
    folder = tmp_path_factory.mktemp("consortium")
    (folder / "grads.py").write_text(block("python-grads"))
    sites = blobs(4)
    together = [tuple(map(np.concatenate, zip(*sites["clients"], strict=True)))]
    for name, clients in (("sites", sites["clients"]), ("pooled", together), ("site-3", sites["clients"][3:])):
        write_federation(folder / f"{name}.h5", **{**sites, "clients": clients}, content=name)
    runs = (
        ("federated", "sites", {"cohort": {"size": 2}}),
        ("ours", "sites", {"cohort": {"size": 2}, "algorithm": OWN}),
        ("pooled", "pooled", {}),
        ("only-site-3", "site-3", {}),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, data, changes in runs:
            for seed in range(2):
                recipe = small(f"runs/{name}-{seed}", name=name, data=f"{data}.h5", seed=seed, **changes)
                hpcfed.run(recipe, quiet=True)
    return folder


def told(project: Path, *arguments: str) -> str:
    """The lines that ``hpcfed report`` prints; no library may warn."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.chdir(project)
        done = CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "")
    return " ".join(done.stdout.split())


def test_names_tell_the_runs_apart_and_pairs_say_what_they_share(project):
    said = told(project, "runs", "--baseline", "federated", "--output", "report", "--page-only")
    for label in ("federated (FedAvg) 0, 1", "ours (FedExProx-GraDS) 0, 1", "pooled (FedAvg)", "only-site-3 (FedAvg)"):
        assert label in said
    assert "Difference from federated (FedAvg)" in said
    assert "ours (FedExProx-GraDS) and the baseline had the same cohorts and batches." in said
    of_others = "only-site-3 (FedAvg), pooled (FedAvg) and the baseline had other data or draws: such pairs share no"
    assert of_others in said
    page = (project / "report" / "report.html").read_text(encoding="utf-8")
    assert "<title>federated (FedAvg), only-site-3 (FedAvg), ours (FedExProx-GraDS)" in page
    assert "did not train on the same data" in page
    assert "grads:fedexprox" in page  # in the recipe, which says where the method is
    assert "Both runs had the same cohorts and batches." in told(
        project, *(f"runs/{name}-{seed}" for name in ("federated", "ours") for seed in range(2)), "--page-only"
    )


@pytest.mark.soak
def test_one_method_needs_no_more_than_the_names(project):
    said = told(project, *(f"runs/{name}-0" for name in ("federated", "pooled")), "--page-only", "--output", "two")
    assert "Difference from federated Method" in said
    assert "pooled 0 " in said


def test_a_sweeps_folder_is_reported_by_its_keys(project, command):
    write_recipe(project, data="sites.h5", rounds=2, evaluate={"clients": {"every": 2}})
    done = command(["sweep", "recipe.yaml", "-g", "local.lr=0.05,0.1", "--seeds", "2", "-q"], project)
    assert done.returncode == 0, done.stderr
    said = told(project, "run-sweep", "--output", "of-sweep", "--page-only")
    assert "FedAvg (lr 0.05) 0, 1" in said
    assert "FedAvg (lr 0.1) 0, 1" in said
    assert "Over clients" in (project / "of-sweep" / "report.html").read_text(encoding="utf-8")


KILLED = """
import os, signal, sys
from hpcfed.lab.report import comparison, write

left, whole = int(sys.argv.pop(1)), write.write_whole

def killed(*arguments, **options):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    whole(*arguments)

write.write_whole = killed
if left < 0:
    comparison.render_page = killed
from hpcfed.cli.main import main
main()
"""
"""A report that is killed when it has written so many files; when it has drawn all and written none, for -1."""


@pytest.mark.soak
@pytest.mark.parametrize("files", often([1], [-1, *range(1, 20)]))
def test_a_killed_report_is_simply_called_again(project, tmp_path, files):
    arguments = ["report", str(project / "runs" / "federated-0"), "--output", str(tmp_path / "report")]
    options = ["--page-only"] if files < 2 else []
    done = launch(0, [str(files), *arguments, *options], program=("-c", KILLED), cwd=ROOT)
    assert done.returncode == -9, done.stderr
    page = tmp_path / "report" / "report.html"
    assert page.exists() == (files > 0)
    assert not page.exists() or "has to be called again" in page.read_text()
    make_report([project / "runs" / "federated-0"], tmp_path / "report", figures=files > 1)
    assert "</html>" in page.read_text()
    assert not list((tmp_path / "report").rglob("*.tmp"))
