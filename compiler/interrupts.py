"""Ctrl-C while TVM runs: it reaches Python inside a function that TVM calls, whose exception TVM makes an error of its own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def surfacing_interrupts() -> Iterator[None]:
    """What the handler of SIGINT raises inside, KeyboardInterrupt as a rule, is what comes out, whoever caught it on the way.

    Nothing changes in threads that get no signals, and where SIGINT has no handler in Python.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    raised: list[BaseException] = []

    def recording(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    signal.signal(signal.SIGINT, recording)
    try:
        yield
    except BaseException as error:
        if raised and error is not raised[0]:
            raise raised[0] from None
        raise
    else:
        if raised:
            raise raised[0]
    finally:
        if signal.getsignal(signal.SIGINT) is recording:
            signal.signal(signal.SIGINT, handler)
