"""Whether an engine reads weights in the bits that a row says, and has not expanded them when it compiled the model."""

from __future__ import annotations

from collections import Counter

_TYPES = {8: ("u8", "i8"), 4: ("u4", "i4")}  # of OpenVINO, by bits
UNKNOWN = "unknown"


def check_weights(types: Counter[str], bits: int) -> None:
    """Raise ValueError unless most products, counted by the type that they read weights in, have so many bits. Where an engine
    does not tell the type of any, the row says so."""
    known = types.total() - types[UNKNOWN]
    few = sum(types[name] for name in _TYPES[bits])
    if 2 * few <= known and known:
        raise ValueError(f"the weights of {few} of {known} products are read in {bits} bits: {dict(types)}")
