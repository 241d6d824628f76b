"""Augmentation: training images shifted and mirrored at random, where they are and after they were normalised."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hpcfed.config.recipe import Augment
from hpcfed.ranks.accelerators import upload


def augmented(x: Tensor, section: Augment, rng: np.random.Generator) -> Tensor:
    """Return a changed copy of the images `x`, (B, …, H, W).

    A crop pads each side with `section.crop` zeros and cuts H×W out, every place alike likely; a flip mirrors columns.
    FedExP's code crops, then flips (util_general.py:35,52), FedDyn's flips, then crops (utils_dataset.py:21-107): since
    a shift to the left is as likely as one to the right, the two orders have the same distribution.

    Args:
        x: normalised images on any device.
        section: what is done, and whether each sample or each batch has a draw of its own.
        rng: drawn from on the host, the same numbers on any device.
    """
    height, width = x.shape[-2:]
    top, left, flips = crops(len(x), section, rng)
    rows = top[:, None] + np.arange(height)
    columns = left[:, None] + np.where(flips[:, None], np.arange(width)[::-1], np.arange(width))
    row, column = (upload(torch.from_numpy(one), x.device) for one in (rows, columns))
    return _cut(x, section.crop, row, column)


def crops(count: int, section: Augment, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where the crops of a minibatch begin, of its samples or one of all, (n,) int64, and which are mirrored."""
    draws, pad = (count if section.per == "sample" else 1), section.crop
    shifts = rng.integers(2 * pad + 1, size=(2, draws))
    top, left = np.where(rng.random(draws) < section.crop_probability, shifts, pad)
    return top, left, rng.random(draws) < section.flip


def cropped(x: Tensor, section: Augment, top: Tensor, left: Tensor, flips: Tensor) -> Tensor:
    """Return `augmented` images by draws that are on their device, as `crops` returns them."""
    height, width = (torch.arange(size, device=x.device) for size in x.shape[-2:])
    columns = left[:, None] + torch.where(flips[:, None], width.flip(0), width)
    return _cut(x, section.crop, top[:, None] + height, columns)


def _cut(x: Tensor, pad: int, row: Tensor, column: Tensor) -> Tensor:
    """Return images padded by zeros and cut out, from the rows (n, H) and columns (n, W) of each, or of all (n = 1)."""
    height, width = x.shape[-2:]
    images = functional.pad(x.reshape(len(x), -1, height, width), (pad, pad, pad, pad))
    sample = torch.arange(len(x), device=x.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=x.device)[:, None, None]
    return images[sample, channel, row[:, None, :, None], column[:, None, None, :]].reshape(x.shape)
