"""What a user asks of a search for formats, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from ....runtime.errors import OptionError
from ...programs.options import suggest
from .choice import OBJECTIVES, Objective
from .metrics import Metric, metric_of
from .plan import BitsPlan, plan_of

MAX_ERROR = 1e-2


@dataclass(frozen=True, slots=True)
class Request:
    """An error by some metric that is not to be exceeded, what shall be least within it, and what a plan says already."""

    max_error: float
    metric: Metric
    objective: Objective = "latency"
    plan: BitsPlan = field(default_factory=lambda: BitsPlan({}))


def request_of(
    max_error: object = MAX_ERROR, metric: object = "relative", objective: object = "latency", bits: object = None
) -> Request:
    """The request that these arguments of a user make.

    Raises:
        OptionError: one of them is not what it should be.
    """
    is_number = isinstance(max_error, (int, float)) and not isinstance(max_error, bool)
    if not is_number or not isfinite(float(max_error)) or float(max_error) <= 0:  # type: ignore[arg-type]  # a number
        raise OptionError("max_error", f"{max_error!r} is no error", "give a number above 0, such as 1e-2")
    found = next((known for known in OBJECTIVES if objective == known), None)
    if found is None:
        raise OptionError("objective", f"unknown objective {objective!r}", suggest(str(objective), OBJECTIVES))
    return Request(float(max_error), metric_of(metric), found, plan_of(bits))  # type: ignore[arg-type]  # a number
