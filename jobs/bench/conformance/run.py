"""How far other packages' trajectories are from the vectors: installs each, runs its rules, and prints a table.

Usage: python jobs/bench/conformance/run.py [--cache FOLDER] [--markdown] [PACKAGE ...]

Each package gets a virtual environment in the cache, made once, from PyPI, at the version below; torch and NumPy are
this environment's. A row has the deviation of each round from ``docs/vectors.json``, whose trajectory
`check_vectors` computes anew; where it deviates, its cause and how far a rule in NumPy with that cause
(`transcribed`) is from what the package did. "run": the installed package's own code; "transcribed": that rule alone.
"""

from __future__ import annotations

import argparse
import json
import os
import site
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import transcribed
from causes import CAUSES, Cause
from check_vectors import deviations, entries, flat, trajectory

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[2] / "docs"
EXACT, SINGLE = 1e-12, 1e-6
"""Deviations called equal, and equal but for single precision on the way."""
MINUTES = 10


LETTER = """## {package}

Hello, and thank you for {name}. We compare federated methods on a problem of 18 samples and 12 parameters on which
nothing is random (`vectors.json`; `check_vectors.py` computes it in NumPy alone). In {package} we found:

{lines}

The numbers are the largest difference of a parameter over the largest parameter, beside the paper's algorithm.
Everything is in `jobs/bench/conformance`, which {seen}. If it is meant so, tell us, and our page will say it in your
words; if not, we are glad to test a change. We publish the table no earlier than thirty days after this letter.
"""


class Package(NamedTuple):
    """A package to install.

    Attributes:
        requirement: with its version.
        others: what it imports and this environment has not; None: all that it requires.
        absent: modules that it imports and no row uses.
    """

    requirement: str
    others: tuple[str, ...] | None = None
    absent: tuple[str, ...] = ()


PACKAGES = {
    "pfl": Package("pfl==0.6.0"),
    "fluke": Package(
        "fluke-fl==0.8.1",
        ("diskcache", "omegaconf", "cerberus", "psutil", "typer", "lightning-utilities", "torchmetrics"),
        ("torchvision", "seaborn", "datasets", "wandb", "clearml", "torch.utils.tensorboard", "opacus"),
    ),
    "fedlab": Package("fedlab==1.3.0", ("nvidia-ml-py",), ("torchvision", "tqdm")),
    "flwr": Package("flwr==1.42.0"),
    "nvflare": Package("nvflare==2.9.0"),
    "fedjax": Package("fedjax==0.0.17"),
    "declearn": Package("declearn==2.9.1"),
    "openfl": Package(
        "openfl==1.9", ("dynaconf", "flatten_json"), ("tensorboardX", "tqdm", "cloudpickle", "flask", "grpc")
    ),
}
ENVIRONMENT = {"PFL_PYTORCH_DEVICE": "cpu", "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}


class Row(NamedTuple):
    """A row of the table; `explained` is the deviation of the rule in NumPy from what the package did."""

    package: str
    version: str
    name: str
    how: str
    by_round: np.ndarray | str
    cause: Cause | None
    explained: float | None


def environment(name: str, package: Package, cache: Path) -> Path:
    """Return the interpreter of a package's environment, made if it is not there."""
    folder = cache / name
    python = folder / "bin" / "python"
    made = folder / "made"
    if made.exists() and made.read_text() == repr(package):
        return python
    print(f"installing {package.requirement} into {folder}", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)
    seen = next(folder.glob("lib/python*/site-packages")) / "project.pth"
    seen.write_text("\n".join(site.getsitepackages()))
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if package.others is None:
        subprocess.run([*install, package.requirement], check=True)
    else:
        subprocess.run([*install, "--no-deps", package.requirement], check=True)
        for other in package.others:
            subprocess.run([*install, other], check=True)  # torch is seen, and not installed again
    made.write_text(repr(package))
    return python


def run(name: str, cache: Path) -> dict[str, Any]:
    """Return what an adapter prints."""
    python = environment(name, PACKAGES[name], cache)
    adapter, absent = HERE / "adapters" / f"{name}_adapter.py", PACKAGES[name].absent
    command = [str(python), str(HERE / "launch.py"), str(adapter), str(DOCS / "vectors.json"), *absent]
    environ = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 * MINUTES, cwd=cache, env=environ)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


class Reference:
    """The vectors, and rules in NumPy beside them."""

    def __init__(self) -> None:
        self.content = json.loads((DOCS / "vectors.json").read_text(encoding="utf-8"))
        self.known = entries(self.content)
        self.clients = self.content["problem"]["clients"]

    def models(self, name: str) -> np.ndarray:
        """Return the models of a case, (4, 12), which the second program must have, too."""
        own, initial, rounds, models = self.known[name]
        again = trajectory(own, initial, rounds, self.clients)
        if deviations(again, models).max() > EXACT:
            raise RuntimeError(f"{name}: check_vectors.py and vectors.json differ")
        return models

    def by_rule(self, rule: str, name: str) -> np.ndarray:
        """Return the models of a case by a rule of `transcribed`, (4, 12)."""
        own, initial, rounds, _ = self.known[name]
        kind = getattr(transcribed, rule)
        method = kind(
            own["algorithm"], own["weights"], self.clients, initial, own.get("local", {}), own.get("guess", "none")
        )
        return np.array([method.round(row) for row in rounds])


def rows_of(found: dict[str, Any], reference: Reference) -> list[Row]:
    """Return the rows of a package that was run."""
    rows = []
    for name, models in found["rows"].items():
        case, cause = name.partition(":")[0], CAUSES.get((found["package"], name))
        if isinstance(models, str):
            rows.append(Row(found["package"], found["version"], name, "run", models, None, None))
            continue
        theirs = np.array([flat(model) for model in models])
        by_round = deviations(theirs, reference.models(case))
        explained = None
        if cause is not None:
            explained = float(deviations(reference.by_rule(cause.rule, case), theirs).max())
        rows.append(Row(found["package"], found["version"], name, "run", by_round, cause, explained))
    return rows


def transcribed_rows(reference: Reference) -> list[Row]:
    """Return the rows of packages that were not run."""
    rows = []
    for (package, name), cause in CAUSES.items():
        if cause.version is None:
            continue
        case = name.partition(":")[0]
        by_round = deviations(reference.by_rule(cause.rule, case), reference.models(case))
        rows.append(Row(package, cause.version, name, "transcribed", by_round, cause, None))
    return rows


def line(row: Row) -> str:
    """Return a row as a line of text."""
    if isinstance(row.by_round, str):
        return f"{row.package:10s}  {row.name:32s}  did not run: {row.by_round}"
    verdict = "agrees" if row.by_round.max() <= EXACT else "float32" if row.by_round.max() <= SINGLE else "deviates"
    text = f"{row.package:10s}  {row.name:32s}  {row.how:11s}  {verdict:8s}  {numbers(row)}"
    if row.cause is not None:
        text += f"  {row.cause.text} ({row.cause.where})"
    return text if row.explained is None else f"{text}; its rule in NumPy is {row.explained:.0e} from it"


def numbers(row: Row) -> str:
    """Return the deviations of the rounds."""
    return " ".join(f"{each:.0e}" for each in row.by_round)


def markdown(rows: list[Row]) -> str:
    """Return the page's two tables: what agrees, by package, and what deviates."""
    ran = [row for row in rows if not isinstance(row.by_round, str)]
    agree = [row for row in ran if row.by_round.max() <= SINGLE]
    lines = ["| package | how | cases | largest deviation |", "|---|---|---|---|"]
    for package in dict.fromkeys(row.package for row in agree):
        own = [row for row in agree if row.package == package]
        worst = max(row.by_round.max() for row in own)
        names = ", ".join(row.name for row in own)
        lines.append(f"| {package} {own[0].version} | {own[0].how} | {names} | {worst:.0e} |")
    lines += ["", "| package | case | how | rounds 1 to 4 | what differs | where |", "|---|---|---|---|---|---|"]
    for row in ran:
        if row.by_round.max() > SINGLE:
            text, where = (row.cause.text, row.cause.where) if row.cause is not None else ("not found", "")
            cells = (f"{row.package} {row.version}", row.name, row.how, numbers(row), text, where)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def letters(rows: list[Row]) -> str:
    """Return a letter to the maintainers of each package with a row that deviates."""
    told = [row for row in rows if not isinstance(row.by_round, str) and row.by_round.max() > SINGLE and row.cause]
    return "\n".join(
        _letter([row for row in told if row.package == name]) for name in dict.fromkeys(r.package for r in told)
    )


def _letter(rows: list[Row]) -> str:
    package, lines = f"{rows[0].package} {rows[0].version}", []
    for cause in dict.fromkeys(row.cause for row in rows if row.cause):
        own = [row for row in rows if row.cause == cause]
        cases = ", ".join(f"{row.name} ({row.by_round[-1]:.0e} after four rounds)" for row in own)
        within = max((row.explained for row in own if row.explained is not None), default=None)
        rule = (
            "" if within is None else f" A rule in NumPy with this one change follows your trajectory to {within:.0e}."
        )
        lines.append(f"- {cause.where}: {cause.text}. Cases: {cases}.{rule}")
    seen = "runs your released package" if rows[0].how == "run" else "has the rule as we read it; we did not run it"
    return LETTER.format(package=package, lines="\n".join(lines), seen=seen, name=rows[0].package)


def main() -> int:
    """Run the packages and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(PACKAGES)}; all without any")
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache" / "hpcfed-conformance", help="default: %(default)s"
    )
    parser.add_argument("--letters", action="store_true", help="print the letters to maintainers")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/conformance.md")
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.packages if name not in PACKAGES]:
        parser.error(f"no package {unknown[0]!r}")
    chosen.cache.mkdir(parents=True, exist_ok=True)
    reference, failed = Reference(), False
    rows = []
    for name in chosen.packages or PACKAGES:
        try:
            rows += rows_of(run(name, chosen.cache.resolve()), reference)
        except (RuntimeError, OSError, subprocess.SubprocessError, ValueError) as error:
            failed = True
            print(f"{name}: not run: {error}", file=sys.stderr)
    if not chosen.packages:
        rows += transcribed_rows(reference)
    print(letters(rows) if chosen.letters else markdown(rows) if chosen.markdown else "\n".join(map(line, rows)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
