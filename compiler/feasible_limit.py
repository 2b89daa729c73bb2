"""Programs within a memory limit, or the error that it is too little, which names one that is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..runtime.errors import MemoryLimitError
from ..runtime.hardware.memory_limit import MemoryLimit
from ..runtime.report import size, speakable_bytes

_SHARES = (0.0, 1 / 32, 1 / 8, 1 / 2)  # of what lies between the least that is possible and the whole
_HALVINGS = 2  # of what then lies between the most that failed and what did not


P = TypeVar("P")


def planned_within(limit: MemoryLimit, whole: int, plan: Callable[[MemoryLimit], P], tell: Callable[[str, float], None]) -> P:
    """The plan within a limit.

    Args:
        whole: bytes of the program without a limit, of which the limit may be a share.
        plan: within a limit in bytes; raises MemoryLimitError.

    Raises:
        MemoryLimitError: nothing keeps within the limit. It names one that does.
    """
    allowed = limit.of(whole)
    try:
        return plan(MemoryLimit(allowed, whole_bytes=whole))
    except MemoryLimitError as error:
        refusal = error

    def fits(tried: int) -> bool:
        tell(f"trying a limit of {size(tried)}", 0.05)
        try:
            plan(MemoryLimit(tried, whole_bytes=whole))
        except MemoryLimitError:
            return False
        return True

    found = feasible_limit(fits, min(max(refusal.least_bytes, allowed + 1), whole), whole)
    raise MemoryLimitError(refusal.what, found, f"raise the limit ({size(found)} would do), or compile smaller inputs")


def feasible_limit(fits: Callable[[int], bool], least: int, whole: int) -> int:
    """Bytes that `fits`, and that a user can be told in three digits, near the fewest: at most seven limits are tried.

    What fits need not grow with the limit, as weights are cut into pieces by it: no number is told that was not tried, but for
    that of the whole, which fits in any case.

    Args:
        least: bytes below which nothing fits.
        whole: bytes of the program without a limit, at least `least`.
    """
    failed, found = least - 1, speakable_bytes(whole)
    for share in _SHARES:
        tried = speakable_bytes(least + int(share * (whole - least)))
        if tried >= found:
            break
        if fits(tried):
            found = tried
            break
        failed = tried
    for _ in range(_HALVINGS):
        tried = speakable_bytes((failed + found) // 2)
        if not failed < tried < found:
            break
        if fits(tried):
            found = tried
        else:
            failed = tried
    return found
