"""Pictures of a few samples of a few clients: images as images, tokens as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcfed.data.federation import Federation
from hpcfed.data.sites import class_names
from hpcfed.errors import cut
from hpcfed.io.console import short_names
from hpcfed.io.figure import literal

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

CLIENTS, SAMPLES = 5, 8
TEXT_WIDTH = 110


def has_pictures(federation: Federation) -> bool:
    """Tell whether samples can be shown: grey or coloured images (C, H, W), or tokens with a vocabulary."""
    shape = federation.feature_shape
    images = federation.task != "next-token" and len(shape) == 3 and shape[0] in (1, 3)
    return images or (federation.task == "next-token" and _words(federation.vocabulary) is not None)


def samples_height(federation: Federation) -> float:
    """Return the height that `draw_samples` needs, in inches."""
    return CLIENTS * (0.25 if federation.task == "next-token" else 0.7)


def draw_samples(federation: Federation, figure: SubFigure) -> None:
    """Draw samples of the first clients that are not empty, one row per client.

    Images are taken at even distances: those of a folder are sorted by class.
    """
    clients = np.flatnonzero(federation.sizes)[:CLIENTS].tolist()
    if not clients:
        return
    if federation.task == "next-token":
        _draw_text(federation, clients, figure)
        return
    names = short_names(class_names(federation))
    grid = figure.subplots(len(clients), SAMPLES, squeeze=False)
    for k, row in zip(clients, grid, strict=True):
        x, y = federation.client(k)
        for axes in row:
            axes.axis("off")
        for axes, place in zip(row, spread_over(len(y)), strict=False):
            axes.imshow(_as_image(x[place]), cmap="gray")
            title = names[y[place]] if federation.task == "classification" else str(y[place]) if names else ""
            axes.set_title(literal(title), fontsize=7, pad=2)
        name = literal(cut(federation.client_name(k), 16))
        row[0].text(-0.15, 0.5, name, fontsize=7, ha="right", va="center", transform=row[0].transAxes)


def spread_over(count: int) -> list[int]:
    """Return at most `SAMPLES` of `count` positions, at even distances."""
    return np.linspace(0, count - 1, min(count, SAMPLES)).astype(np.int64).tolist() if count else []


def text_of(tokens: np.ndarray, vocabulary: Any) -> str:
    """Return tokens (T,) as text, with � for tokens beyond the vocabulary."""
    words = _words(vocabulary) or []
    joint = "" if all(len(word) <= 1 for word in words) else " "
    return joint.join(words[token] if token < len(words) else "\ufffd" for token in tokens.reshape(-1).tolist())


def _words(vocabulary: Any) -> list[str] | None:
    """Return each token's text, from a string of characters, a list, or a mapping from words to numbers."""
    if isinstance(vocabulary, dict) and all(isinstance(number, int) for number in vocabulary.values()):
        vocabulary = sorted(vocabulary, key=vocabulary.__getitem__)
    return [str(word) for word in vocabulary] if isinstance(vocabulary, list | str) else None


def _draw_text(federation: Federation, clients: list[int], figure: SubFigure) -> None:
    axes = figure.subplots()
    axes.axis("off")
    for line, k in enumerate(clients):
        written = repr(text_of(federation.client(k)[0][0], federation.vocabulary))[1:-1]
        shown = literal(f"{cut(federation.client_name(k), 16)}: {written[:TEXT_WIDTH]}")
        axes.text(0, 1 - (line + 0.5) / CLIENTS, shown, fontsize=7, family="monospace", va="center")


def _as_image(sample: np.ndarray) -> np.ndarray:
    """Return (H, W) or (H, W, 3) in [0, 1]."""
    image = sample.astype(np.float64)
    low, high = (0, 255) if sample.dtype == np.uint8 else (image.min(), image.max())
    image = (image - low) / (high - low if high > low else 1)
    return image[0] if len(image) == 1 else image.transpose(1, 2, 0)
