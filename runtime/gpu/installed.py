"""The GPU of this machine, of either maker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

from .cuda_driver import CudaDriver
from .driver import Driver
from .hip_driver import HipDriver

_DRIVERS: dict[str, Callable[[], Driver]] = {"cuda": CudaDriver, "rocm": HipDriver}
_lock = threading.Lock()


def driver(kind: str) -> Driver:
    """That of this process for targets of the kind "cuda" or "rocm".

    Raises:
        DriverError: there is no driver or no GPU.
    """
    with _lock:
        return _driver(kind)


@cache
def _driver(kind: str) -> Driver:
    return _DRIVERS[kind]()
