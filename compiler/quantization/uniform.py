"""`compile(model, precision="int8", calibration=batches)` and "int8-rows": all units in 8 bits that can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .batches import check_stateless, data_digest, repeatable
from .calibration import Progress
from .units import UnitFormat

if TYPE_CHECKING:
    import onnx_ir as ir

    from ...runtime.target import Target


class UniformQuantizer:
    """Quantizes models, with one set of calibration data or without; `digest` tells sets apart.

    Without data, "int8" assumes random ones, with a warning. "int8-rows" needs none: matrix products and recurrences have ranges
    of rows, and the convolutions stay float; with data these have ranges of tensors.

    Raises:
        InputError: it is no calibration data.
    """

    def __init__(self, data: object | None, target: Target, form: UnitFormat = "int8") -> None:
        self._data = repeatable(data)
        self._target, self._form = target, form
        self.digest = "assumed" if data is None else data_digest(self._data)

    def __call__(self, model: ir.Model, progress: Progress | None = None) -> ir.Model:
        """A quantized copy of a model. Raises as `calibrate`, and UnsupportedModelError for states to be calibrated."""
        from .quantizer import calibrate, uncalibrated  # imports the passes' runner

        if self._form == "int8-rows" and self._data is None:
            found = uncalibrated(model, self._target)
            return found.place(found.uniform("int8-rows"))
        check_stateless(model)
        calibrated = calibrate(model, self._data, self._target, progress=progress)
        rows = calibrated.uniform("int8-rows") if self._form == "int8-rows" else {}
        return calibrated.place({**calibrated.uniform(), **rows})
