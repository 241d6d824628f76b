"""``hpcfed`` of several ranks, one of which is killed at a moment that `tests.faults.killed` knows.

mpirun -n 2 python struck.py RANK MOMENT FOLDER ARGUMENTS…
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hpcfed.cli.main import main
from tests.faults.killed import watch

if __name__ == "__main__":
    rank, moment, folder, *arguments = sys.argv[1:]
    sys.argv[1:] = []  # a study's page has the command that wrote it
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == rank:
        watch(str(Path(folder).resolve()), moment)
    main(arguments)
