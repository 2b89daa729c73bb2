"""Weights that a user may write to between the compilations of a model's programs, each of which holds those of its time."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from .digest import arrays_digest

if TYPE_CHECKING:
    import onnx_ir as ir


class HeldWeights:
    """Which weights the program of a model holds that was made last."""

    def __init__(self) -> None:
        self._digest: str | None = None  # of these; None: there is no program yet

    def warn_of(self, digest: str, name: str) -> None:
        """Warn where a model's earlier programs hold other weights than those of `digest`."""
        if self._digest not in (None, digest):
            what = (
                f"{name}: its weights have changed since programs for other calls were compiled, which keep those that there were"
            )
            warnings.warn(f"{what}: compile it again", stacklevel=2)

    def note(self, digest: str) -> None:
        """A program has been made that holds these."""
        self._digest = digest


def written_weights_digest(model: ir.Model) -> str:
    """Digest of the weights of a graph that are arrays and tensors in memory, which somebody else may have, too: of no file."""
    import onnx_ir as ir

    elsewhere = (ir.ExternalTensor, ir.StringTensor, ir.TensorProtoTensor)  # in files, and in bytes that nobody can write to
    held = ((name, value.const_value) for name, value in model.graph.initializers.items())
    return arrays_digest((name, one.numpy) for name, one in held if one is not None and not isinstance(one, elsewhere))
