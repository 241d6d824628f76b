"""The ensemble of the models that sites train alone: the mean of their predicted probabilities, or of their outputs.

With p̄ the models' mean softmax (classification) or mean sigmoid (multi-label tasks), metrics are computed from its
logits, log p̄ or log(p̄/(1 − p̄)). For regression, metrics are computed from the mean output. Survival has no ensemble:
log hazards of separate Cox models have no common scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpcfed.assembly import build_loss
from hpcfed.config.recipe import Seeds
from hpcfed.data.cache import Samples
from hpcfed.data.federation import Federation
from hpcfed.data.shards import Shards
from hpcfed.evaluation.metrics import WholeMetric, whole_metrics
from hpcfed.lab.loaded import LoadedRun, load
from hpcfed.lab.study.arms import ALONE, Arm
from hpcfed.lab.study.federations import files_of
from hpcfed.lab.study.measures import LOSS
from hpcfed.lab.study.plan import DATA, Study
from hpcfed.lab.study.results import GLOBAL, RunResult, Values
from hpcfed.models.losses import ACCURACY, BatchMetric, metrics_for
from hpcfed.run_folder.certificate import refuse_changed
from hpcfed.run_folder.cut import MODELS

Functions = tuple[dict[str, BatchMetric], dict[str, WholeMetric]]
"""Metrics as functions of outputs and targets, by name: sums over samples, then metrics of all samples at once."""
ROOM = 1 << 30
"""Bytes of samples to cache."""


def ensemble_result(study: Study, split: int, seed: Seeds) -> RunResult:
    """Measure the ensemble of one split and seed on all test samples of the split.

    Raises:
        InputError: a stored model of a site cannot be read.
    """
    arms = [arm for arm in study.arms if arm.kind == ALONE and arm.site in study.trainers(split)]
    modules = [load_run(study, arm, split, seed).evaluated for arm in arms]
    tests, task = test_samples(study, split), study.samples.dataset.task
    with torch.no_grad():
        outputs = {
            site: mean_prediction([module(x).double() for module in modules], task) for site, (x, _) in tests.items()
        }
    functions = functions_of(study, split)
    measured = {site: _measure(functions, (outputs[site], tests[site][1])) for site in outputs}
    together = torch.cat(list(outputs.values())), torch.cat([tests[site][1] for site in outputs])
    whole = _measure(functions, together)
    return RunResult(split, seed.model, {(GLOBAL, site): values for site, values in measured.items()}, {}, whole)


def load_run(study: Study, arm: Arm, split: int, seed: Seeds) -> LoadedRun:
    """Return a finished run with its models.

    Raises:
        InputError: a model, or a client's private part of it, is not the one that the run left.
    """
    folder = study.run_folder(arm, split, seed)
    refuse_changed(folder, *MODELS, "private/*")
    return load(folder)


def test_samples(study: Study, split: int) -> dict[int, Samples]:
    """Return site → its test samples (x, y) in a split, in the scale and dtype of the runs; only sites with any."""
    out = study.splits.each[split].site
    with Federation.open(files_of(study.folder / DATA, split).sites) as federation:
        shards = Shards(federation, getattr(torch, study.recipe.dtype), torch.device("cpu"), ROOM)
        if out is not None:
            return {out: shards.test_chunk(0, federation.num_test)}
        found = {site: shards.client_test(k) for k, site in enumerate(study.trainers(split))}
    return {site: samples for site, samples in found.items() if len(samples[0])}


def mean_prediction(outputs: Sequence[Tensor], task: str) -> Tensor:
    """Return the mean prediction of several models, (n, …), from their `outputs`, (n, …) each.

    Classification: log of the mean probability; multi-label: logits of the mean probability; else: the mean output.
    """
    stacked = torch.stack(list(outputs))
    if task == "classification":
        return stacked.log_softmax(-1).logsumexp(0) - torch.tensor(float(len(outputs))).log()
    if task == "multi-label":
        positive, negative = (torch.nn.functional.logsigmoid(sign * stacked).logsumexp(0) for sign in (1, -1))
        return positive - negative
    return stacked.mean(0)


def _measure(functions: Functions, samples: Samples) -> Values:
    """Return metric → value from `samples`, (outputs, targets); None if it is undefined."""
    output, target = samples
    sums, whole = functions
    found: Values = {}
    for name, metric in sums.items():
        total, count = metric(output, target)
        found[name] = total / count if count else None
    for name, function in whole.items():
        cells = function.cells(output, target)
        defined, numbers = cells[:, 1].all(), cells[:, 0]
        shaped = numbers.reshape(function.shape).tolist() if function.shape else float(numbers[0])
        found[name] = shaped if defined else None
    return found


def functions_of(study: Study, split: int) -> Functions:
    """Return two mappings from a metric's name to its function: sums over samples; metrics of all samples at once.

    The first has accuracy, too, if the task has it, and the loss, in the runs' dtype and with the class weights of the
    split's training samples. Cox's loss, which needs all samples at once, is in neither.
    """
    recipe, dataset, dtype = study.recipe, study.samples.dataset, getattr(torch, study.recipe.dtype)
    sums = metrics_for(recipe.evaluate.metrics, recipe.python_path)
    if dataset.task in ACCURACY:
        sums = {"accuracy": ACCURACY[dataset.task], **sums}
    with Federation.open(files_of(study.folder / DATA, split).sites) as federation:
        loss = build_loss(recipe, federation, dtype, torch.device("cpu"))
    if not loss.whole:
        sums = {LOSS: lambda output, target: loss.summed(output.to(dtype), target), **sums}
    return sums, whole_metrics(recipe.evaluate.metrics, dataset.task, dataset.num_classes, recipe.python_path)
