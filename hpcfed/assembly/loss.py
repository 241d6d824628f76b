"""The loss of a run, with its class weights."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from hpcfed.cohort import measured_in, present_in
from hpcfed.config.metrics import CLASSES, targets_of
from hpcfed.config.recipe import LossSection, Recipe
from hpcfed.data.federation import Federation
from hpcfed.errors import InputError

if TYPE_CHECKING:
    import torch

    from hpcfed.models.losses import Loss


def build_loss(recipe: Recipe, federation: Federation, dtype: torch.dtype, device: torch.device) -> Loss:
    """Return the recipe's loss in training, with its class weights.

    Raises:
        InputError: it fits neither the task nor the targets.
    """
    return _build(recipe, federation, dtype, device, present_in(recipe, federation.num_clients))


def build_measured_loss(
    recipe: Recipe, federation: Federation, dtype: torch.dtype, device: torch.device, trained: Loss
) -> Loss:
    """Return the loss of evaluations: the `trained` one, but for the weights of ``balanced`` where clients that do not
    train count in evaluations. So runs on different clients' data are measured by one loss.
    """
    measured = measured_in(recipe, federation.num_clients)
    if recipe.loss.weights != "balanced" or (measured == present_in(recipe, federation.num_clients)).all():
        return trained
    return _build(recipe, federation, dtype, device, measured)


def _build(
    recipe: Recipe, federation: Federation, dtype: torch.dtype, device: torch.device, counted: np.ndarray
) -> Loss:
    """Return the recipe's loss with the class weights of the clients `counted`, (N,) bool."""
    import torch

    from hpcfed.models.losses import OF_TASK, loss_for
    from hpcfed.models.portable import portable_loss

    weights = class_weights(recipe.loss, federation, counted, measured_in(recipe, federation.num_clients))
    of_classes = None if weights is None else torch.tensor(weights, dtype=dtype, device=device)
    columns = prod(federation.target_shape)
    loss = loss_for(recipe.loss, federation.task, recipe.python_path, of_classes, columns)
    if recipe.bits == "native":
        return loss
    name = OF_TASK[federation.task] if recipe.loss.name == "auto" else recipe.loss.name
    return portable_loss(name, loss)


def class_weights(
    section: LossSection, federation: Federation, counted: np.ndarray, measured: np.ndarray
) -> list[float] | list[list[float]] | None:
    """Return the weight of each class in the loss, (C,), or in each client's, (N, C); None without weights.

    ``balanced`` is n / (C · n_c), so that each class counts alike and the mean weight of all training samples is 1: of
    the clients `counted`, (N,) bool; 1 for a class that they lack. ``balanced-by-site`` is the same of each client's
    own samples.

    Raises:
        InputError: the targets are not one label a sample, or a class has no weight, or no training sample of the
            clients `measured`, (N,) bool, or by site of a client.
    """
    if section.weights is None:
        return None
    if targets_of(federation.task, federation.num_classes) != CLASSES:
        raise InputError("loss.weights needs classes, one a sample", got=f"a {federation.task} federation")
    count = max(2, federation.num_classes or 0)
    if isinstance(section.weights, list):
        if len(section.weights) != count:
            raise InputError("loss.weights", expected=f"{count} numbers", got=str(len(section.weights)))
        return section.weights
    if section.weights == "balanced-by-site":
        return _by_site(federation, count, counted & (federation.sizes > 0))
    found = _classes(federation, counted, count)
    needed = found if found.all() else _classes(federation, measured, count)
    if not needed.all():
        what = "loss.weights: balanced needs training samples of every class"
        raise InputError(what, where=str(federation.path), got=f"none of class {int(needed.argmin())}")
    return np.where(found, found.sum() / (count * np.maximum(found, 1)), 1.0).tolist()


def _classes(federation: Federation, clients: np.ndarray, count: int) -> np.ndarray:
    """Return the number of training samples of each class, (C,), that the `clients`, (N,) bool, have."""
    labels = federation.train()[1].ravel()[np.repeat(clients, federation.sizes)]
    return np.bincount(labels, minlength=count)


def _by_site(federation: Federation, count: int, filled: np.ndarray) -> list[list[float]]:
    """Return n_i / (C · n_ic) of each client, (N, C); 0 for all but those `filled`, (N,) bool.

    Raises:
        InputError: naming the first of them that lacks a class.
    """
    sizes, labels = federation.sizes, federation.train()[1].ravel()
    places = np.repeat(np.arange(len(sizes)), sizes) * count + labels
    found = np.bincount(places, minlength=len(sizes) * count).reshape(len(sizes), count)
    if len(absent := np.argwhere((found == 0) & filled[:, None])):
        client, label = absent[0].tolist()
        what = "loss.weights: balanced-by-site needs training samples of every class at every site"
        got = f"none of class {label} at {federation.client_name(client)} (client {client})"
        raise InputError(what, where=str(federation.path), got=got, remedy="use balanced, or leave it out")
    return (sizes[:, None] / (count * np.maximum(found, 1)) * filled[:, None]).tolist()
