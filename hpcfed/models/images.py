"""The shape of images, which come with an axis of channels or without."""

from __future__ import annotations

from hpcfed.errors import InputError


def image_shape(features: tuple[int, ...], who: str) -> tuple[int, int, int]:
    """Return (C, H, W) of samples of shape (C, H, W), or (H, W) with the one channel added.

    Args:
        features: shape of one sample's features.
        who: needs images, for the message.

    Raises:
        InputError: the samples have another shape.
    """
    if len(features) not in (2, 3):
        expected = "samples of shape (H, W) or (C, H, W)"
        raise InputError(f"{who} needs images", expected=expected, got=f"shape {features}")
    channels, height, width = (1, *features)[-3:]
    return channels, height, width
