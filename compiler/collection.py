"""Python's cyclic garbage collector, held back where much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Collect no cycles inside. A graph is made of them and lives on; the collector would look through all of it, and through all
    that torch has imported, again and again: a tenth of the time of a compilation.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
