"""Print the lowest version that pyproject.toml promises of each library, as constraints of pip (`make test-lowest`)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
ABSENT = {"mpi4py": "4.1.0"}
"""4.0 has no wheels; where a cluster builds it by its own MPI, it does."""


def lowest() -> Iterator[str]:
    """Yield ``name==version`` of each requirement with a lowest version, in all extras but the developers'."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = [of_it for name, of_it in project["optional-dependencies"].items() if name not in ("docs", "test", "dev")]
    for requirement in (*project["dependencies"], *(one for of_it in extras for one in of_it)):
        if match := re.match(r"([\w.-]+)>=([\w.]+)", requirement):
            yield f"{match[1]}=={ABSENT.get(match[1], match[2])}"


if __name__ == "__main__":
    print("\n".join(lowest()))
