"""`compile(model, precision="int8", calibration=batches)`: all units in 8 bits that can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .batches import data_digest, repeatable
from .calibration import Progress

if TYPE_CHECKING:
    import onnx_ir as ir

    from ...runtime.target import Target


class UniformQuantizer:
    """Quantizes models with one set of calibration data, None for data that are made up; `digest` tells sets apart.

    Raises:
        InputError: it is no calibration data.
    """

    def __init__(self, data: object | None, target: Target) -> None:
        self._data = repeatable(data)
        self._target = target
        self.digest = "assumed" if data is None else data_digest(self._data)

    def __call__(self, model: ir.Model, progress: Progress | None = None) -> ir.Model:
        """A quantized copy of a model. Raises as `calibrate`."""
        from .quantizer import calibrate  # imports the passes' runner

        calibrated = calibrate(model, self._data, self._target, progress=progress)
        return calibrated.place(calibrated.uniform())
