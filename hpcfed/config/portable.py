"""Check of recipes with ``bits: portable``: linear models trained by SGD on CPUs, built-in losses and methods."""

from __future__ import annotations

from collections.abc import Iterator

from hpcfed.config.recipe import Recipe
from hpcfed.errors import InputError

MODELS = ("linear", "logistic", "quadratic")


def check_portable(recipe: Recipe, task: str) -> None:
    """Refuse a recipe that cannot be computed in portable arithmetic.

    Raises:
        InputError: naming the first key that hinders it.
    """
    for hindrance, remedy in _hindrances(recipe, task):
        raise InputError(f"bits: portable with {hindrance}", remedy=f"{remedy}, or leave bits out")


def _hindrances(recipe: Recipe, task: str) -> Iterator[tuple[str, str]]:
    """Yield what is not portable, and what to do about it."""
    model, local, section = recipe.model, recipe.local, recipe.evaluate
    if model.factory is not None or model.name not in MODELS:
        yield f"model: {model.factory or model.name}", f"use a linear model ({', '.join(MODELS)})"
    if task in ("survival", "next-token"):
        yield f"a {task} federation", "use one of classification or regression"
    if recipe.loss.factory is not None:
        yield f"loss.factory: {recipe.loss.factory}", "use a built-in loss"
    if recipe.loss.weights is not None:
        yield "loss.weights", "leave the weights out"
    if recipe.algorithm.factory is not None:
        yield f"algorithm.factory: {recipe.algorithm.factory}", "use a built-in method"
    for part in recipe.chain_parts:
        if part.factory is not None:
            yield f"updates, means and down: {part.factory}", "use built-in parts"
    if recipe.parameters.given:
        yield f"parameters: {recipe.parameters.given}", "leave them out"
    if local.step is not None:
        yield f"local.step: {local.step}", "leave it out"
    if local.optimizer != "sgd":
        yield f"local.optimizer: {local.optimizer}", "use sgd"
    if local.augment is not None:
        yield "local.augment", "leave it out"
    if local.compile:
        yield "local.compile: true", "leave it out"
    if local.engine == "sequential":
        yield "local.engine: sequential", "use batched"
    if local.matmul == "onednn":
        yield "local.matmul: onednn", "leave it out"
    if recipe.device not in ("auto", "cpu"):
        yield f"device: {recipe.device}", "use cpu"
    if recipe.precision != "float32":
        yield f"precision: {recipe.precision}", "use float32"
    if recipe.reduction == "fast":
        yield "reduction: fast", "use exact"
    if section.metrics:
        yield f"evaluate.metrics: {', '.join(section.metrics)}", "measure them afterwards, on model.safetensors"
    if "fine-tuned" in section.clients.models:
        yield "evaluate.clients.models: fine-tuned", "use global or last"
