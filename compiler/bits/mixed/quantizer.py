"""`compile(model, precision="mixed")`: the formats are searched for, or taken from a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ....runtime.errors import InputError
from ...programs.builder import CompileModel
from ...programs.digest import combine
from ...programs.options import Options
from ...quantization.batches import check_stateless, data_digest, repeatable
from .plan import BitsPlan
from .request import Request

if TYPE_CHECKING:
    import onnx_ir as ir


class MixedQuantizer:
    """Gives models the formats that are best within an error, by one set of calibration data; `digest` tells requests apart.

    Raises:
        InputError: it is no calibration data.
    """

    def __init__(self, data: object | None, options: Options, request: Request, drive: CompileModel) -> None:
        self._data = repeatable(data)
        self._options = options
        self._request = request
        self._drive = drive
        known = "assumed" if data is None else data_digest(self._data)
        plan = BitsPlan(request.plan.units, request.plan.overrides).as_text()
        self.digest = combine(known, repr(request.max_error), request.metric.identity, request.objective, plan)

    def __call__(self, model: ir.Model, progress: Callable[[str, float], None] | None = None) -> ir.Model:
        """The graph of a model, which stays as it is, with formats.

        Raises:
            As `search`; InputError if the model has symbolic dimensions; UnsupportedModelError if it has states.
        """
        from ...frontend.dimensions import is_dynamic
        from .search import planned, search  # imports TVM

        if is_dynamic(model):
            what = "has symbolic dimensions, and formats are chosen for one shape"
            raise InputError(
                "model", what, "give it concrete shapes: prefuse bits --shape NAME=SIZES, or example inputs as `args`"
            )
        check_stateless(model)
        fixed = planned(model, self._data, self._options, self._request, progress)
        if fixed is not None:
            return fixed
        return search(model, self._data, self._options, self._request, self._drive, progress).model(self._options.precision)
