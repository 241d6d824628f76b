"""What a first contribution takes: files written or edited by hand, and lines to read first.

    python jobs/bench/newcomers.py            the table of CONTRIBUTING.md

Lines to read are those of the contract and of the nearest example, files or single classes and functions of them, to
ten. Generated files (``make generated``) and the line of CHANGELOG.md do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RULES = ("hpcfed/algorithms/_base.py", "hpcfed/types.py")


class FirstJob(NamedTuple):
    """Something to add: the files touched (a ``*`` stands for a new one's name), and what is read first.

    `read` names files, or ``path:Name`` for a class, function or assigned name of one.
    """

    what: str
    touched: Sequence[str]
    read: Sequence[str]


JOBS = (
    FirstJob("a method like FedProx, in the package",
             ["hpcfed/algorithms/*.py", "jobs/bench/conformance/check_vectors.py"],
             ["hpcfed/algorithms/fedprox.py", *RULES]),
    FirstJob("a server step of your own, q-FFL", ["*.py"], ["tests/contract/qffl.py", *RULES]),
    FirstJob("a tilt of your own, FedSAM", ["*.py"], ["tests/contract/fedsam.py", RULES[0], "hpcfed/types.py:Tilt"]),
    FirstJob("a local step of your own, MOON", ["*.py"], ["tests/contract/moon.py", "hpcfed/client/own_step.py"]),
    FirstJob("a part of updates of your own, TernGrad", ["*.py"],
             ["tests/contract/terngrad.py", "hpcfed/updates/_base.py"]),
    FirstJob("a robust mean of your own", ["*.py"], ["tests/contract/meamed.py", "hpcfed/updates/_robust.py"]),
    FirstJob("an attack of your own", ["*.py"], ["tests/contract/noisy.py", "hpcfed/updates/_base.py"]),
    FirstJob("a model, in the package", ["hpcfed/models/architectures/*.py", "hpcfed/lab/cite/__init__.py"],
             ["hpcfed/models/architectures/mlp.py", "hpcfed/models/__init__.py:Spec"]),
    FirstJob("a data source, in the package", ["data_prep/sources/*.py", "hpcfed/lab/cite/__init__.py"],
             ["data_prep/sources/digits.py", "data_prep/dataset.py"]),
    FirstJob("a partition scheme", ["data_prep/partition/*.py"],
             ["data_prep/partition/iid.py", "data_prep/partition/__init__.py"]),
    FirstJob("a metric of your own", ["*.py"], ["docs/own-project.md#5-your-metrics-and-baselines"]),
    FirstJob("a metric, in the package", ["hpcfed/config/metrics.py", "hpcfed/evaluation/metrics.py", "docs/recipe.md"],
             ["hpcfed/config/metrics.py", "hpcfed/evaluation/metrics.py"]),
    FirstJob("a key of the recipe that the engine reads", ["hpcfed/config/recipe.py", "hpcfed/assembly/parts.py"],
             ["hpcfed/config/recipe.py:Local", "hpcfed/assembly/parts.py:parts_of"]),
    FirstJob("a column of the record, of your own", ["*.py"], ["tests/contract/qffl.py"]),
    FirstJob("a column of the record, in the package",
             ["hpcfed/run_folder/recorder.py", "hpcfed/run_folder/rounds.py", "docs/record.md",
              "tests/cli/test_run.py"],
             ["hpcfed/run_folder/recorder.py", "hpcfed/types.py:Means"]),
    FirstJob("a figure of a report", ["hpcfed/lab/report/sections.py"],
             ["hpcfed/lab/report/sections.py", "hpcfed/lab/report/plots.py:LinePlot"]),
    FirstJob("a section of a report with a table",
             ["hpcfed/lab/report/sections.py", "hpcfed/lab/report/tables.py"],
             ["hpcfed/lab/report/sections.py", "hpcfed/lab/report/tables.py:timing_table"]),
    FirstJob("a scheduler beside SLURM",
             ["hpcfed/cluster/submit/schedulers/*.py", "hpcfed/cluster/submit/schedulers/*.sh.j2",
              "hpcfed/cluster/step/schedulers/*.py"],
             ["hpcfed/cluster/submit/schedulers/pbs.py", "hpcfed/cluster/submit/schedulers/pbs.sh.j2",
              "hpcfed/cluster/submit/scheduler.py", "hpcfed/cluster/step/schedulers/pbs.py",
              "hpcfed/cluster/step/scheduler.py"]),
    FirstJob("an observer of your own", ["*.py"], ["hpcfed/run_folder/observers/__init__.py"]),
    FirstJob("a world in place of MPI", ["*.py"], ["tests/contract/glooworld.py", "hpcfed/ranks/world.py:World"]),
)  # fmt: skip


def lines_of(place: str) -> int:
    """Return the number of lines of a file, of a class, function or name in it, or of a page's section."""
    path, _, heading = place.partition("#")
    path, _, name = path.partition(":")
    text = (ROOT / path).read_text(encoding="utf-8")
    if heading:
        titled = (part.lower().replace(".", "").replace(" ", "-") for part in text.split("\n## "))
        section = next(part for part in titled if part.startswith(heading))
        return section.count("\n")
    if not name:
        return text.count("\n")
    (found,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == name)
    return int(found.end_lineno or 0) - found.lineno + 1


def table() -> str:
    """Return the table in Markdown.

    Raises:
        FileNotFoundError: a file that is named is not there.
    """
    rows = ["| to add | files | lines to read | begin with |", "|---|---|---|---|"]
    for job in JOBS:
        for path in job.touched:
            if "*" not in path and not (ROOT / path).is_file():
                raise FileNotFoundError(path)
        lines = round(sum(map(lines_of, job.read)), -1)
        begin = ", ".join(f"`{place.partition('#')[0].replace(':', '`, `')}`" for place in job.read)
        rows.append(f"| {job.what} | {len(job.touched)} | {lines} | {begin} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
