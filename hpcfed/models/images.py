"""The shape of images, with or without an axis of channels."""

from __future__ import annotations

from hpcfed.errors import InputError


def image_shape(features: tuple[int, ...], model: str) -> tuple[int, int, int]:
    """Return (C, H, W) for samples of shape (C, H, W), and (1, H, W) for samples of shape (H, W).

    Args:
        features: shape of one sample's features.
        model: its name, for the message.

    Raises:
        InputError: the samples have another shape.
    """
    if len(features) not in (2, 3):
        expected = "samples of shape (H, W) or (C, H, W)"
        raise InputError(f"{model} needs images", expected=expected, got=f"shape {features}")
    channels, height, width = (1, *features)[-3:]
    return channels, height, width
