"""A recorded run that is repeated without some clients: loading it, comparing both runs on common test samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from hpcfed.assembly import build_loss
from hpcfed.cohort import measured_in
from hpcfed.config.recipe import Recipe
from hpcfed.data.federation import MAX_LISTED, Federation
from hpcfed.data.shards import Shards
from hpcfed.errors import InputError, counted, first_of
from hpcfed.lab.loaded import LoadedRun, load
from hpcfed.models.losses import ACCURACY
from hpcfed.provenance.code_of_rounds import Permission
from hpcfed.provenance.recorded import RecordedRun, placed_recipe, recorded
from hpcfed.run_folder.folder import RunFolder


def base_of(run: Path, data: Path | None, code: Path | None) -> RecordedRun:
    """Load the recorded run that is repeated without some clients.

    `data` and `code` are the present paths of its federation file and of the user's code; None if they have not moved.

    Raises:
        InputError: the run cannot be read, or it is private (``secret_seed``, or noise that hides clients).
    """
    folder = run.resolve()
    base = recorded(folder, placed_recipe(folder, data, code), Permission(installed=True))
    if base.recipe.secret_seed is not None or base.recipe.is_private:
        by = "cohort.without" if base.recipe.local.noise is not None else "a federation file that lacks the client"
        raise InputError(
            "a private run without a client would have noise of its own, and beside it would show what the client does",
            where=str(run),
            remedy=f"train one by {by}: its ε adds to this one's",
        )
    return base


def on_common_samples(before: Recipe, folder: Path, recipe: Recipe) -> Iterator[str]:
    """Yield a line that compares the final models of two runs on the test samples that both evaluate.

    The line has accuracies if the task has them, else losses, or the reason why the recorded run cannot be evaluated.
    Nothing is yielded if both runs evaluate the same samples, if they have none in common, or if either has no result.

    Args:
        before, folder: the recorded run's recipe and folder.
        recipe: the recipe of the run without some clients.
    """
    with Federation.open(recipe.data) as federation:
        offsets, count = federation.test_offsets, federation.num_clients
        there, here = measured_in(before, count), measured_in(recipe, count)
        common = there & here
        if offsets is None or np.array_equal(there, here) or not federation.num_test_of(common):
            return
        if not all(RunFolder(one).has_result() for one in (folder, recipe.output)):
            return
        runs = load(folder, data=recipe.data), load(recipe.output, data=recipe.data)
        clients = np.flatnonzero(common & (np.diff(offsets) > 0)).tolist()
        try:
            scores = [_score(run, federation, clients) for run in runs]
        except InputError as error:
            yield f"the recorded run is not measured on the test samples that both count: {error}"
            return
        names = federation.client_names()
        others = first_of([names[k] for k in np.flatnonzero(there & ~here).tolist()], MAX_LISTED)
        left, right = (f"{100 * score:.2f} %" if federation.task in ACCURACY else f"{score:.6g}" for score in scores)
        measure = "test accuracy" if federation.task in ACCURACY else "test loss"
        samples = counted(federation.num_test_of(common), "sample")
        yield f"on the {samples} that both count: {measure} {right} without {others}, {left} with"


def _score(run: LoadedRun, federation: Federation, clients: list[int]) -> float:
    """Return the accuracy (or loss) of a run's evaluated model on some clients' test samples."""
    dtype, cpu = getattr(torch, run.recipe.dtype), torch.device("cpu")
    shards = Shards(federation, dtype, cpu, capacity=0)
    private = run.recipe.parameters.keeps_private
    outputs, targets = [], []
    with torch.no_grad():
        for client in clients:
            x, y = shards.client_test(client)
            module = run.evaluated_of(client) if private else run.evaluated
            outputs.append(torch.cat([module(part) for part in x.split(run.recipe.evaluate.batch_size)]))
            targets.append(y)
    output, target = torch.cat(outputs), torch.cat(targets)
    if federation.task in ACCURACY:
        right, total = ACCURACY[federation.task](output, target)
        return right / total
    loss = build_loss(run.recipe, federation, dtype, cpu)
    return loss.of_all(output, target)
