"""The zoo: every architecture that `python -m tests.zoo` compiles."""

from __future__ import annotations

from prefuse.examples.models import MODELS

from .architecture import Architecture, Example
from .perception import AUDIO, VISION
from .text import DECODERS, ENCODER_DECODERS, ENCODERS, EXPERTS, RECURRENCES

_HUGGING_FACE = (*ENCODERS, *DECODERS, *ENCODER_DECODERS, *VISION, *AUDIO, *EXPERTS, *RECURRENCES)

ZOO: dict[str, Architecture | Example] = {
    **{one.name: one for one in _HUGGING_FACE},
    **{f"our-{name}": Example(f"our-{name}", name) for name in MODELS},
}
