"""Lines on valid settings of a run that may be unintended, above all on those that have no effect."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpcfed import updates
from hpcfed.assembly import auto_device
from hpcfed.assembly.left_out import TRAINING_ONLY, without_facts
from hpcfed.assembly.private import private_remarks
from hpcfed.client.batched.tiles import step_cost
from hpcfed.config.limits import Checkpoint
from hpcfed.config.recipe import Recipe
from hpcfed.errors import counted, first_of
from hpcfed.models.losses import ACCURACY
from hpcfed.parts import Parts

LARGE_STEPS = {"sgd": 10.0, "adam": 0.5, "yogi": 0.5}
"""Step sizes of the client optimizers that are hardly ever meant."""
MUCH = 1.5
"""Ratio of the modelled costs of a tile and of a rank's share of it from which the tile's empty slots are told."""


def remarks(recipe: Recipe, parts: Parts) -> Iterator[str]:
    """Yield a line for each setting of a resolved recipe that may be unintended."""
    if line := auto_device.remark(parts.step_work, parts.model.vector.device.type):
        yield line
    if not recipe.deterministic and parts.repeats_bits:
        yield "deterministic: false has no effect on a CPU, whose kernels add in one order"
    if recipe.deterministic and parts.engine.graphs is not None and parts.engine.graphs.any_order:
        names = ", ".join(parts.engine.graphs.any_order)
        yield f"the model has kernels that a GPU adds up in any order ({names}): the record says bitwise: false"
    if parts.chain.privacy is None:
        yield from _on_clients(recipe, parts)
        yield from _on_defaults(recipe, parts)
    yield from private_remarks(recipe, parts)
    sizes = parts.cohorts.fewest_members, parts.cohorts.most_members
    yield from updates.remarks(recipe, parts.chain, parts.method, *sizes)
    yield from _on_local_work(recipe, parts)
    yield from _on_the_model(recipe, parts)
    yield from _on_tiles(recipe, parts)
    yield from _on_evaluation(recipe, parts)
    yield from _on_the_end(recipe, parts)


def _on_clients(recipe: Recipe, parts: Parts) -> Iterator[str]:
    if empty := parts.cohorts.without_samples:
        what = "client has no samples and counts" if empty == 1 else "clients have no samples and count"
        yield f"{empty} {what} like the others, without a step (weights: uniform)"
    if len(parts.cohorts.never) == np.count_nonzero(parts.cohorts.present & (parts.federation.sizes > 0)):
        yield "no client that takes part has samples: nothing is trained"
    if idle := parts.cohorts.idle(parts.world.size):
        yield f"{idle}; the result is the same"
    if recipe.cohort.sampling == "bernoulli" and recipe.cohort.size is None and recipe.cohort.fraction is None:
        yield "cohort.sampling: bernoulli has no effect without size or fraction: all clients take part"
    if recipe.cohort.stream == "authors" and (seed := recipe.seed.cohort):
        shifted = f"the cohorts of seed.cohort {seed} are those of 0, from round {seed + 1} on"
        yield f"cohort.stream: authors: {shifted}; cohort: 0 in seed has the published ones with any other seeds"
    statistics, weights = recipe.evaluate.statistics == "training", recipe.loss.weights == "balanced"
    if parts.cohorts.never and (statistics or weights):
        what = " and ".join(["evaluate.statistics: training"] * statistics + ["loss.weights: balanced"] * weights)
        clients, leave = counted(len(parts.cohorts.never), "client"), "cohort.without leaves clients out"
        yield f"{what}: of all samples, also those of {clients} in no round of cohort.schedule; {leave}"
    if parts.model.own and (parts.cohorts.measured & ~parts.cohorts.present).any():
        yield "clients left out (cohort.without) are measured with the private part of the initial model"
    for facts in without_facts(recipe, parts.federation).values():
        if facts["exact"] == TRAINING_ONLY:
            yield f"without {', '.join(facts['clients'].values())}: {TRAINING_ONLY}: {'; '.join(facts['since'])}"


def _on_defaults(recipe: Recipe, parts: Parts) -> Iterator[str]:
    """Yield the method's own defaults that are not FedAvg's: a comparison with it is of them, too."""
    name, sizes = parts.method.name, parts.federation.sizes[parts.cohorts.present]
    own = parts.method.local.weights
    least = sizes[sizes > 0].min(initial=sizes.max())
    if recipe.weights == own == "uniform" and least < sizes.max():
        what = f"clients of {least:,} to {sizes.max():,} samples weigh alike (weights: uniform"
        yield f"{what}, the default of {name}; FedAvg's is samples)"
    final = recipe.evaluate.model
    if final == parts.method.final_model != "last" and (recipe.evaluate.every or recipe.evaluate.train.every):
        yield f"evaluated is the {final} model (evaluate.model, the default of {name}); FedAvg's is the last iterate"


def _on_local_work(recipe: Recipe, parts: Parts) -> Iterator[str]:
    local, guess, budget = recipe.local, recipe.guess, recipe.budget
    if local.lr > LARGE_STEPS[local.optimizer] and local.step is None:
        usual = f"most models diverge from {LARGE_STEPS[local.optimizer]:g} on, and many from less"
        yield f"local.lr: {local.lr:g} is a large step for {local.optimizer}: {usual}"
    if local.optimizer == "sgd" and local.lr * local.weight_decay >= 1:
        product = f"local.lr times local.weight_decay is {local.lr * local.weight_decay:g}"
        yield f"{product}: each step takes as much away from the parameters as they are, or more"
    if local.step is not None:
        yield f"local.step: {local.step} trains one client after another (local.engine: sequential)"
    if late := [entry.round for entry in local.lr_schedule if entry.round > recipe.rounds]:
        rounds = f"round {late[0]}, after the last of {recipe.rounds} rounds"
        yield f"local.lr_schedule has a step size from {rounds}; it is not used"
    if local.clip == "linear" and local.clip_norm is None:
        yield "local.clip: linear has no effect without local.clip_norm"
    if parts.method.local.full_gradient:
        what = "a round is one step with all samples of a client, whatever else local and budget say"
        yield f"{parts.method.name}: {what}"
    if local.momentum and guess == "none" and local.steps == 1 and budget is None:
        yield f"local.momentum: {local.momentum} has no effect in one step, which starts from none"
    if guess == "remaining" and budget is None:
        why = "all of local.steps are taken" if local.steps is not None else "local.epochs are all taken"
        yield f"guess: remaining has no effect without a budget: {why}"
    if local.guess_moments == "all" and guess == "none":
        yield "local.guess_moments: all has no effect without guess"
    if budget is not None and local.steps is not None and guess != "remaining":
        yield f"local.steps: {local.steps} has no effect beside budget without guess: remaining"
    if local.augment is not None and local.augment.crop_probability != 1 and not local.augment.crop:
        yield "local.augment.crop_probability has no effect without crop"


def _on_the_model(recipe: Recipe, parts: Parts) -> Iterator[str]:
    found = parts.model.findings
    if found.gives_probabilities and parts.federation.task == "classification" and recipe.loss.factory is None:
        yield "the model's output is probabilities; cross-entropy takes the scores before a softmax: leave it out"
    if found.own_seed is not None and recipe.model.init is None:
        what = f"the model's code sets torch's seed to {found.own_seed}"
        yield f"{what}: its initial parameters may be the same for every seed.model"
    if found.unsteady:
        yield f"in evaluation, too, the model's output for a sample {found.unsteady}, and so does every score"
    if found.unused:
        what = "look for no_grad and detach, or name them in parameters.frozen"
        yield f"the model's output does not depend on {first_of(found.unused, 4)}, which are not trained: {what}"
    if rounded := parts.model.rounded:
        what = f"the model's {'buffer' if len(rounded) == 1 else 'buffers'} {first_of(rounded, 4)}"
        yield f"{what}: rounded to {recipe.dtype}, as all of the model is; dtype: float64 keeps their digits"


def _on_tiles(recipe: Recipe, parts: Parts) -> Iterator[str]:
    tile, share = parts.engine.tile, -(-parts.cohorts.most_members // parts.world.size)
    work, device = parts.engine_choice.slot_work, parts.model.vector.device
    costs = [step_cost(slots, work, device) for slots in (share, tile)]
    if share < tile and MUCH * costs[0] < costs[1]:
        what = f"tiles of {tile} clients, of whom each rank trains {share}: the other slots are computed for nothing"
        yield f"{what}; local.tile={share} shares the work, with other last bits"
    if recipe.model.factory is not None or parts.engine_choice.why:
        since = "" if parts.engine_choice.why else _out_of_tiles(recipe, parts)
        yield f"{'your' if recipe.model.factory else 'the'} model: {parts.engine_choice.account}{since}"
    if parts.engine.graphs is not None and (why := parts.engine.graphs.hindrance):
        yield f"the GPU is asked for each step's operations one by one, since they cannot be recorded: {why}"


def _out_of_tiles(recipe: Recipe, parts: Parts) -> str:
    """Return which setting has a model that could be read trained by itself, and why; "" if none."""
    local, loss = recipe.local, recipe.loss
    reasons = {
        "local.compile takes the module as it is": local.compile,
        f"precision: {recipe.precision} is of the module's own calls": recipe.precision == "bf16-mixed",
        "loss.weights: balanced-by-site is a loss for each client": loss.weights == "balanced-by-site",
        "Cox's loss is of a whole minibatch": parts.federation.task == "survival" and loss.factory is None,
    }
    return next((f": {why}" for why, is_so in reasons.items() if is_so), "")


def _on_evaluation(recipe: Recipe, parts: Parts) -> Iterator[str]:
    section, federation = recipe.evaluate, parts.federation
    if parts.trains_personal and (section.every or section.clients.every) and "personal" not in section.clients.models:
        what = f"{parts.method.name}: the common model is evaluated, not clients' own"
        measured = "evaluate.clients: {every: 1, models: [global, personal]} measures both"
        yield f"{what}; {measured if parts.chain.privacy is None else 'with noise those are neither measured nor kept'}"
    if not parts.model.findings.has_known_outputs and federation.task in ACCURACY:
        yield "no accuracy, since the model's outputs are no scores of the classes"
    if section.every and not federation.num_test:
        yield "no test loss or accuracy, since the federation has no test set"
        if recipe.stop.by_scores:
            yield f"stop.{recipe.stop.by_scores} has no effect: the federation has no test set"
    elif section.every and recipe.stop.by_scores and not federation.num_test_of(parts.cohorts.measured):
        yield f"stop.{recipe.stop.by_scores} has no effect: no client that is measured has test samples"
    if not section.clients.every and section.clients.models != ["global"]:
        yield "evaluate.clients: no client is measured, since its every is 0"
    if section.metrics and not (section.every or section.train.every or section.clients.every):
        yield f"evaluate.metrics: {', '.join(section.metrics)} not measured, since every period of evaluate is 0"
    if recipe.stop.test_accuracy is not None and federation.task not in ACCURACY:
        yield f"stop.test_accuracy has no effect: {federation.task} has no accuracy"


def _on_the_end(recipe: Recipe, parts: Parts) -> Iterator[str]:
    stop, keep = recipe.stop, recipe.checkpoint.keep
    every = recipe.evaluate.every if parts.federation.num_test_of(parts.cohorts.measured) else 0
    evaluations = recipe.rounds // every if every else 0  # by which stop goes; the last round is scored, too
    few = f"{counted(evaluations, 'evaluation')} in {counted(recipe.rounds, 'round')}"
    if stop.patience is not None and every and stop.patience >= evaluations:
        yield f"stop.patience: {stop.patience} has no effect, with {few}"
    key = next((key for key in ("test_accuracy", "target") if getattr(stop, key) is not None), None)
    if key and every and stop.for_ > evaluations:
        yield f"stop.{key} has no effect with for: {stop.for_}, with {few}"
    if recipe.checkpoint.every == 0 and keep != Checkpoint().keep:
        yield f"checkpoint.keep: {keep} is for early stops alone, since checkpoint.every is 0"
