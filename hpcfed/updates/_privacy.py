"""Requirements on a recipe with noise: nothing may leave its clients without noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hpcfed.config.recipe import Recipe
from hpcfed.errors import InputError
from hpcfed.types import Method
from hpcfed.updates._accounting import default_delta
from hpcfed.updates._base import NORMS, UpdatePart
from hpcfed.updates._chain import Chain
from hpcfed.updates._mechanism import Mechanism
from hpcfed.updates.clip import Clip
from hpcfed.updates.noise import Amount, Noise
from hpcfed.updates.weight import Weight

FEW = 100
"""Clients below which client-level noise costs the model."""
REFUSED: Mapping[str, tuple[str, str]] = {
    "weights": ("a client with more samples would count for more than its bound", "use weights: uniform, or weight"),
    "on_bad_client": ("who is left out would be seen in the mean", "use on_bad_client: stop"),
    "update_hashes": ("hashes are not noised", "leave them out"),
    "sentinel": ("it records hashes of updates", "use sentinel: off"),
    "evaluate.train": ("it measures clients' samples", "leave it out"),
    "evaluate.clients": ("it measures clients' samples", "leave it out"),
    "evaluate.statistics": ("they are of clients' samples", "leave it out"),
    "evaluate.model": ("it averages the clients' own models", "use last, last-two or step-average"),
    "evaluate.every": ("the test sets are clients' own samples", "use evaluate.every: 0, or a common test set"),
    "loss.weights": ("balanced counts the labels of all clients", "use numbers, or balanced-by-site"),
    "parameters": ("averaged buffers are not noised, and private parts lie in the run folder", "leave them out"),
    "cohort.schedule": ("the size of a cohort has to be a number of the recipe", "use cohort.size or fraction"),
    "cohort.without": ("beside the run with all clients it would show what one of them changes", "leave it out"),
    "cohort.stream": ("its seeds are of 32 bits", "leave it out"),
    "algorithm": ("", "use another method, such as fedavg"),
    "secret_seed": ("clients' states lie in checkpoints, which it encrypts", "set secret_seed (docs/privacy.md)"),
}
"""Keys of the recipe that noise does not go with → why, and what to do."""

OF_SAMPLES = {
    "loss.weights": ("they count the labels of samples", "give numbers"),
    "parameters": ("averaged buffers are not noised, and private parts are not clipped", "leave them out"),
    "on_bad_client": ("who is left out depends on its samples", "use on_bad_client: stop"),
    "local.compile": ("gradients of samples are mapped", "use compile: false"),
}


def mechanism_of(recipe: Recipe, chain: Chain, num_clients: int) -> Mechanism | None:
    """Return the mechanism of a recipe whose cohorts are drawn among so many clients; None where nothing is noised.

    Raises:
        InputError: the lists do not bound what the noise has to hide.
    """
    if not recipe.is_private:
        return None
    noise, bounded = _noise_of(recipe, chain)
    clip = _clip_of(bounded)
    section = recipe.cohort
    size = section.size_in(num_clients) or num_clients
    by_chance = section.sampling == "bernoulli"
    expected = section.fraction * num_clients if by_chance and section.fraction is not None else float(size)
    return Mechanism(
        clip=clip.norm,
        scales=clip.scales,
        multiplier=noise.multiplier or 0.0,
        delta=default_delta(num_clients, "1 client") if noise.delta is None else noise.delta,
        rounds=recipe.rounds,
        num_clients=num_clients,
        expected=expected,
        sampling="bernoulli" if by_chance else "size",
        is_secret=recipe.secret_seed is not None,
        at_clients=recipe.noise_at == "clients",
        quantile=clip.quantile,
        survivors=None if recipe.secure_aggregation is None else recipe.secure_aggregation.survivors,
    )


def check_quantile(mechanism: Mechanism) -> None:
    """Refuse a quantile whose bits the noise does not hide.

    Raises:
        InputError: clients add the noise; or cohorts are too small for its amount.
    """
    if mechanism.quantile is not None and mechanism.at_clients:
        raise InputError("clip.quantile with noise of clients: its bits would not be noised", remedy="fix the norm")
    if not mechanism.vector_multiplier > 0:
        raise InputError(
            "clip.quantile with so much noise",
            expected=f"cohorts of more than {10 * mechanism.multiplier:g} clients",
            got=f"{mechanism.expected:g}",
            remedy="fix the norm, or draw more",
        )


def _noise_of(recipe: Recipe, chain: Chain) -> tuple[Amount, Sequence[UpdatePart]]:
    """Return the noise, and the parts of ``updates`` before it.

    Raises:
        InputError: there is more than one; or it is not the first of ``means``, where others change what it hides.
    """
    found = [part for part in (*chain.updates, *chain.means) if isinstance(part, Amount)]
    if len(found) > 1:
        raise InputError("noise in updates and means", expected="once", got=f"{len(found)} times")
    if recipe.noise_at == "clients":
        return found[0], chain.updates[: [isinstance(part, Amount) for part in chain.updates].index(True)]
    if chain.robust is not None:
        remedy = "use the mean of clipped updates"
        raise InputError(
            "means: noise behind a robust mean, which one client may move by more than its norm", remedy=remedy
        )
    if not isinstance(chain.means[0], Noise):
        raise InputError("means: noise comes first", remedy="put it at the beginning of the list")
    return found[0], chain.updates


def _clip_of(parts: Sequence[UpdatePart]) -> Clip:
    """Return the clip, behind which a client's norm can only fall.

    Raises:
        InputError: there is none.
    """
    others = [part for part in parts if not isinstance(part, Weight)]
    if not others or not isinstance(others[-1], Clip):
        raise InputError(
            "noise hides a client's vectors of a known norm alone",
            expected="clip as the last of updates before it, or before weight",
            got=type(parts[-1]).__name__.lower() if parts else "none",
            remedy="add {clip: {norm: 1.0}} to updates",
        )
    return others[-1]


def private_defaults(recipe: Recipe) -> Recipe:
    """Return a recipe whose clients are hidden with what it takes in the place of other runs' defaults."""
    if not recipe.is_private:
        return recipe
    sentinel = "off" if recipe.sentinel == "on" else recipe.sentinel
    return recipe.model_copy(update={"weights": recipe.weights or "uniform", "sentinel": sentinel})


def check_sample_privacy(recipe: Recipe, method: Method, *, has_own_test_sets: bool) -> None:
    """Refuse what would let anything of a client's samples out beside its noised steps.

    Raises:
        InputError: with the reason.
    """
    local, evaluate = recipe.local, recipe.evaluate
    holds = {
        "evaluate.train": (evaluate.train.every > 0, f"every {evaluate.train.every}"),
        "evaluate.clients": (evaluate.clients.every > 0, f"every {evaluate.clients.every}"),
        "evaluate.statistics": (evaluate.statistics == "training", "training"),
        "evaluate.every": (has_own_test_sets and evaluate.every > 0, str(evaluate.every)),
        "loss.weights": (recipe.loss.weights in ("balanced", "balanced-by-site"), str(recipe.loss.weights)),
        "parameters": (
            recipe.parameters.keeps_private or recipe.parameters.buffers == "averaged",
            recipe.parameters.given,
        ),
        "on_bad_client": (recipe.on_bad_client == "skip", "skip"),
        "local.compile": (local.compile, "true"),
    }
    for key, (is_so, value) in holds.items():
        if is_so:
            reason, remedy = {**REFUSED, **OF_SAMPLES}[key]
            raise InputError(f"local.noise with {key}: {value}: {reason}", remedy=remedy)
    for why, is_so in {
        f"its clients report numbers: {', '.join(method.local.scalars)}": bool(method.local.scalars),
        "it reads the loss on all samples": method.local.loss_at_w,
        "it takes gradients twice a step": method.local.evaluates_elsewhere,
        "ε does not count the steps of clients' own models, which have the noise of the common one's": getattr(
            method.local, "trains_personal", False
        ),
        "its step size compares mean ‖Δ_i‖² with ‖Δ̄‖², which noise of clients makes up to |S|/2 times too large": (
            NORMS in method.reads
        ),
    }.items():
        if is_so:
            raise InputError(f"local.noise with {method.name}: {why}", remedy="use another method, such as fedavg")


def check_privacy(recipe: Recipe, method: Method, *, has_own_test_sets: bool, stateful: bool) -> None:
    """Refuse what would let anything out that is not noised.

    Args:
        recipe: private, with `private_defaults`.
        method: of the recipe.
        has_own_test_sets: whether the federation's test samples belong to clients.
        stateful: whether clients keep a state.

    Raises:
        InputError: with the reason.
    """
    for key, got, why in _hindrances(recipe, method, has_own_test_sets=has_own_test_sets, stateful=stateful):
        reason, remedy = REFUSED[key]
        raise InputError(f"noise with {key}: {got}: {why or reason}", remedy=remedy)


def _hindrances(
    recipe: Recipe, method: Method, *, has_own_test_sets: bool, stateful: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield the keys that noise does not go with, their values, and a reason where `REFUSED` has none."""
    evaluate = recipe.evaluate
    holds = {
        "weights": (recipe.weights == "samples", "samples"),
        "on_bad_client": (recipe.on_bad_client == "skip", "skip"),
        "update_hashes": (recipe.update_hashes, "true"),
        "sentinel": (recipe.sentinel == "strict", "strict"),
        "evaluate.train": (evaluate.train.every > 0, f"every {evaluate.train.every}"),
        "evaluate.clients": (evaluate.clients.every > 0, f"every {evaluate.clients.every}"),
        "evaluate.statistics": (evaluate.statistics == "training", "training"),
        "evaluate.model": (evaluate.model in ("client-average", "cohort-average"), evaluate.model),
        "evaluate.every": (has_own_test_sets and evaluate.every > 0, str(evaluate.every)),
        "loss.weights": (recipe.loss.weights == "balanced", "balanced"),
        "parameters": (
            recipe.parameters.keeps_private or recipe.parameters.buffers == "averaged",
            recipe.parameters.given,
        ),
        "cohort.schedule": (recipe.cohort.schedule is not None, "a schedule"),
        "cohort.without": (recipe.cohort.without is not None, "some left out"),
        "cohort.stream": (recipe.cohort.stream == "authors", "authors"),
        "secret_seed": (stateful and recipe.secret_seed is None, f"none, with {method.name} and its updates"),
    }
    for key, (is_so, value) in holds.items():
        if is_so:
            yield key, str(value), ""
    if method.local.scalars:
        yield "algorithm", method.name, f"its clients report numbers besides vectors: {', '.join(method.local.scalars)}"
    if method.normalize is not None:
        yield "algorithm", method.name, "its normalisation multiplies what was clipped"
