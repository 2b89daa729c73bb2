"""The inputs of one call, by what a model takes. Drawn from torch's global generator, which the caller seeds."""

from __future__ import annotations

import torch
from torch import Tensor

_BATCH, _LENGTH, _VOCABULARY = 2, 12, 96


def text() -> dict[str, Tensor]:
    """Token numbers [2, 12] and their mask; the second text is three tokens shorter."""
    mask = torch.ones(_BATCH, _LENGTH, dtype=torch.int64)
    mask[1, -3:] = 0
    return {**text_without_mask(), "attention_mask": mask}


def text_without_mask() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, _VOCABULARY, (_BATCH, _LENGTH))}


def text_pair() -> dict[str, Tensor]:
    return {**text(), **_beginning()}


def layout() -> dict[str, Tensor]:
    """Tokens and the boxes (left, top, right, bottom) in which they stand."""
    corners = torch.randint(0, 50, (_BATCH, _LENGTH, 2))
    return {**text(), "bbox": torch.cat([corners, corners + torch.randint(1, 50, corners.shape)], dim=-1)}


def image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(_BATCH, 3, 32, 32)}


def large_image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(_BATCH, 3, 64, 64)}


def image_and_text() -> dict[str, Tensor]:
    return {**text(), **image()}


def wave() -> dict[str, Tensor]:
    """A thousand samples of sound."""
    return {"input_values": torch.randn(_BATCH, 1000)}


def spectrogram() -> dict[str, Tensor]:
    """40 frames of 16 bands."""
    return {"input_values": torch.randn(_BATCH, 40, 16)}


def frames_and_text() -> dict[str, Tensor]:
    return {"input_features": torch.randn(_BATCH, 40, 16), **_beginning()}


def bands_and_text() -> dict[str, Tensor]:
    return {"input_features": torch.randn(_BATCH, 16, 40), **_beginning()}


def _beginning() -> dict[str, Tensor]:
    """The beginning of the text that the model is to go on with."""
    return {"decoder_input_ids": torch.randint(3, _VOCABULARY, (_BATCH, 7))}
