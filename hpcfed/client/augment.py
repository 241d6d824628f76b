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
    draws, pad = (len(x) if section.per == "sample" else 1), section.crop
    shifts = rng.integers(2 * pad + 1, size=(2, draws))
    top, left = np.where(rng.random(draws) < section.crop_probability, shifts, pad)
    flips = rng.random(draws) < section.flip
    height, width = x.shape[-2:]
    rows = top[:, None] + np.arange(height)
    columns = left[:, None] + np.where(flips[:, None], np.arange(width)[::-1], np.arange(width))
    images = functional.pad(x.reshape(len(x), -1, height, width), (pad, pad, pad, pad))
    sample = torch.arange(len(x), device=x.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=x.device)[:, None, None]
    row = upload(torch.from_numpy(rows), x.device)[:, None, :, None]
    column = upload(torch.from_numpy(columns), x.device)[:, None, None, :]
    return images[sample, channel, row, column].reshape(x.shape)
