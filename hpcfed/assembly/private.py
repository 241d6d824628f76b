"""Set-up of private runs: the noise that a recipe asks for, its ε, and the seeds that are drawn from in secret."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcfed.cohort import Cohorts
from hpcfed.config.recipe import Recipe
from hpcfed.config.secret import commitment_of, is_open, key_of
from hpcfed.config.updates import ChainPart
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError
from hpcfed.ranks.world import World
from hpcfed.run_folder.private import promised
from hpcfed.types import Method
from hpcfed.updates._accounting import accountant, default_delta, multiplier_for
from hpcfed.updates._chain import Chain
from hpcfed.updates._layout import Layout
from hpcfed.updates._mechanism import Privacy
from hpcfed.updates._privacy import FEW, check_privacy, check_quantile, check_sample_privacy, mechanism_of
from hpcfed.updates._samples import SampleMechanism, sample_accountant, sample_multiplier_for

if TYPE_CHECKING:
    from hpcfed.parts import Parts

ENOUGH = 1 + 1e-6
"""Factor of a target ε within which it is reached."""


def private(recipe: Recipe, chain: Chain, method: Method, federation: Federation) -> Recipe:
    """Return a recipe with its noise multiplier and δ; others as they are.

    Raises:
        InputError: something of it is not private, or its noise does not keep the ε that it asks for.
    """
    mechanism = mechanism_of(recipe, chain, federation.num_clients)
    if mechanism is None:
        return recipe
    own_tests = federation.num_test > 0 and federation.test_offsets is not None
    stateful = method.local.stateful or chain.stateful
    check_privacy(recipe, method, has_own_test_sets=own_tests, stateful=stateful)
    key = "updates" if mechanism.at_clients else "means"
    parts: list[ChainPart] = list(getattr(recipe, key))
    place = [part.name for part in parts].index("noise")
    args, cohort = dict(parts[place].args), Cohorts(recipe, federation.sizes).clients
    target = args.get("epsilon")
    if target is not None and not mechanism.multiplier:
        mechanism = mechanism.with_multiplier(multiplier_for(mechanism, target, cohort))
    check_quantile(mechanism)
    _check_target(accountant(mechanism, cohort)(mechanism.rounds), target, recipe, mechanism.multiplier)
    amount = {**args, "multiplier": mechanism.multiplier, "delta": mechanism.delta}
    parts[place] = ChainPart(name="noise", args=amount)
    return recipe.model_copy(update={key: parts})


def private_samples(recipe: Recipe, method: Method, federation: Federation, cohorts: Cohorts) -> Recipe:
    """Return a recipe with the multiplier and δ of its ``local.noise``; others as they are.

    Raises:
        InputError: something of it is not private, or its noise does not keep the ε that it asks for.
    """
    amount = recipe.local.noise
    if amount is None:
        return recipe
    own_tests = federation.num_test > 0 and federation.test_offsets is not None
    check_sample_privacy(recipe, method, has_own_test_sets=own_tests)
    mechanism = sample_mechanism_of(recipe, federation)
    assert mechanism is not None
    # cohorts of the secret seed follow from the multiplier, too, so that it cannot be solved for by them
    work = cohorts.most_work if mechanism.is_secret else cohorts.work
    if amount.multiplier is None and amount.epsilon is not None:
        mechanism = replace(mechanism, multiplier=sample_multiplier_for(mechanism, amount.epsilon, work))
    _check_target(sample_accountant(mechanism, work)(recipe.rounds), amount.epsilon, recipe, mechanism.multiplier)
    found = amount.model_copy(update={"multiplier": mechanism.multiplier, "delta": mechanism.delta})
    return recipe.model_copy(update={"local": recipe.local.model_copy(update={"noise": found})})


def _check_target(found: float, target: float | None, recipe: Recipe, multiplier: float) -> None:
    if target is not None and found > target * ENOUGH:
        what = f"noise: after {recipe.rounds} rounds ε is {found:.4g} with multiplier {multiplier:g}"
        raise InputError(what, expected=f"at most epsilon, {target:g}", remedy="leave multiplier out, or train anew")


def sample_mechanism_of(recipe: Recipe, federation: Federation) -> SampleMechanism | None:
    """Return the mechanism of ``local.noise``; None without."""
    amount, sizes = recipe.local.noise, federation.sizes
    if amount is None:
        return None
    batch = sizes.max() if recipe.local.batch_size == "full" else int(recipe.local.batch_size)
    rates = np.minimum(1.0, batch / np.maximum(sizes, 1)) * (sizes > 0)
    return SampleMechanism(
        clip=amount.clip,
        multiplier=amount.multiplier or 0.0,
        delta=default_delta(int(sizes.max()), "clients of 1 sample") if amount.delta is None else amount.delta,
        rounds=recipe.rounds,
        rates=tuple(rates.tolist()),
        is_secret=recipe.secret_seed is not None,
    )


def committed(recipe: Recipe) -> Recipe:
    """Return a resolved recipe with the commitment to its secret seed, if it has one.

    Raises:
        InputError: the seed cannot be read, or is not the one that was committed to; or the data have no hash, so that
            runs on others would have the same noise.
    """
    if recipe.secret_seed is not None and recipe.data_content is None:
        raise InputError(
            "secret_seed: the data have no hash; a run on others would have the same noise, and the difference none",
            where=str(recipe.data),
            remedy="write the file by hpcfed prepare or hpcfed.write_federation",
        )
    secret = recipe.secret
    return recipe if secret is None else recipe.model_copy(update={"secret_commitment": commitment_of(secret)})


def with_secret_seeds(recipe: Recipe, world: World) -> tuple[Recipe, bytes | None]:
    """Return a recipe whose cohorts, minibatches and noise are drawn from its secret seed, and the key of states.

    It is never written: its seeds are secret. Called on every rank; rank 0 alone reads the secret.

    Raises:
        InputError: it cannot be read, or is not the run's.
    """
    if recipe.secret_seed is None:
        return recipe, None
    secret = world.on_root(lambda: recipe.secret)
    assert secret is not None
    seed = recipe.seed.model_copy(update={"cohort": secret, "batches": secret})
    return recipe.model_copy(update={"seed": seed}), key_of(secret)


def privacy_of(
    recipe: Recipe, chain: Chain, federation: Federation, layout: Layout, key: bytes | None
) -> Privacy | None:
    """Return what a simulation needs where its means are noised."""
    mechanism = mechanism_of(recipe, chain, federation.num_clients)
    return None if mechanism is None else Privacy(mechanism, layout, key)


def private_remarks(recipe: Recipe, parts: Parts) -> Iterator[str]:
    """Yield what is said of a private run when it begins."""
    mechanism, epsilon = promised(parts)
    if mechanism is None or epsilon is None:
        return
    level = "sample" if recipe.local.noise is not None else "client"
    yield (
        f"{level}-level differential privacy: ε {epsilon(recipe.rounds):.4g} at δ {mechanism.delta:.3g} after "
        f"{recipe.rounds} rounds ({mechanism.neighbours}; {mechanism.drawn}); docs/privacy.md says what it covers"
    )
    if not mechanism.is_secret:
        yield "without secret_seed the noise follows from the recipe: this ε holds for nobody who has the recipe"
    count = parts.federation.num_clients if level == "client" else int(parts.federation.sizes.max())
    if mechanism.delta * count >= 1:
        what = f"δ {mechanism.delta:.3g} is not below 1/{count}"
        yield f"{what}: publishing one of {count} {level}s as it is would keep it, at ε 0"
    if level == "client" and count < FEW:
        yield f"noise that hides one of {count} clients costs the model: it is for {FEW} or more"
    if recipe.secret_seed is not None and is_open(recipe.secret_seed):
        yield f"secret_seed: {recipe.secret_seed} can be read by everybody: chmod 600"


def privacy_facts(parts: Parts) -> dict[str, Any]:
    """Return the entry ``privacy`` of ``environment.json``; nothing where nothing is noised."""
    mechanism, _ = promised(parts)
    return {} if mechanism is None else {"privacy": mechanism.facts()}
