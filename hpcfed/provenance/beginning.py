"""A new run folder that holds the first rounds of a recorded run, from which any recipe can continue."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path

from hpcfed.config.recipe import Recipe
from hpcfed.io.atomic import write_whole
from hpcfed.run_folder.checkpoint.layout import Manifest, stem
from hpcfed.run_folder.code import CODE_FILE
from hpcfed.run_folder.files import CLIENTS, ENVIRONMENT, read_environment
from hpcfed.run_folder.identity import identity
from hpcfed.run_folder.machines import BEFORE, went_on
from hpcfed.run_folder.rounds import RECORD
from hpcfed.run_folder.update_hashes import UPDATE_HASHES
from hpcfed.version import ARITHMETIC


def begin_after(folder: Path, run: Path, start: int, recipe: Recipe) -> None:
    """Create a run folder in which `recipe` can continue after round `start` of another run; called on rank 0 alone.

    Args:
        folder: the folder to create.
        run: folder of the recorded run, which has a checkpoint of round `start`.
        start: last of the rounds to copy.
        recipe: the recipe of the new run.
    """
    folder.mkdir()
    with (run / RECORD).open("rb") as record:
        write_whole(folder / RECORD, islice(record, start))
    for name in (CODE_FILE, CLIENTS, UPDATE_HASHES):
        if (run / name).exists():
            shutil.copyfile(run / name, folder / name)
    if before := went_on(read_environment(run), {}, start):  # where the copied rounds were computed
        write_whole(folder / ENVIRONMENT, json.dumps({"arithmetic": ARITHMETIC, BEFORE: before}) + "\n")
    there, here = run / "checkpoints" / stem(start), folder / "checkpoints" / stem(start)
    here.parent.mkdir()
    for suffix in (".server", ".clients"):
        if there.with_suffix(suffix).exists():
            shutil.copyfile(there.with_suffix(suffix), here.with_suffix(suffix))
    manifest = Manifest.read(there.with_suffix(".json")).model_copy(update={"recipe": identity(recipe)})
    write_whole(here.with_suffix(".json"), manifest.to_json())
