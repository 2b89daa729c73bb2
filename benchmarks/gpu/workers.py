"""Measurements in processes of their own: a GPU's fault makes all later calls of a process fail, and some kernels never end.

A worker says through a pipe which item it begins and what it finds. Where it dies, or takes too long for an item, that item is a
fault, and a new worker takes the rest.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from typing import IO, Any

Line = dict[str, Any]
_FAULTY = 3  # the code with which a worker ends whose item has failed
_MOST_TEXT = 2000  # of what a worker that died has said
_KILL_SECONDS = 10.0


def supervised(
    command: Callable[[int, Sequence[str]], Sequence[str]], items: Sequence[str], key: str, item_seconds: float, end: float
) -> Iterator[Line]:
    """What workers find for the items, in order.

    Args:
        command: that of a worker which writes to this descriptor what it finds for these items, by `work`.
        key: under which a line names its item.
        item_seconds: of an item at most, that of the first with the start of its worker.
        end: until when there is time (time.monotonic).
    """
    waiting = list(items)
    while waiting:
        if time.monotonic() >= end:
            yield from ({key: item, "skipped": "no time left"} for item in waiting)
            return
        with TemporaryFile() as said:
            under_way, fault = waiting[0], ""
            for message in _messages(command, waiting, item_seconds, end, said):
                if "begin" in message:
                    waiting.remove(under_way := message["begin"])
                elif "line" in message:
                    yield message["line"]
                else:
                    fault = message["fault"]
            if fault:
                yield {key: under_way, "fault": fault}
                if under_way in waiting:  # no worker gets as far as to begin
                    waiting.remove(under_way)


def _messages(
    command: Callable[[int, Sequence[str]], Sequence[str]], items: Sequence[str], item_seconds: float, end: float, said: IO[bytes]
) -> Iterator[Line]:
    """What one worker writes, and at last the fault with which it ended, if it did."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        command(writing, items), pass_fds=[writing], stdout=said, stderr=subprocess.STDOUT, start_new_session=True
    )
    os.close(writing)
    left, fault = b"", ""
    try:
        limit = min(time.monotonic() + item_seconds, end)
        while True:
            if not select.select([reading], [], [], max(limit - time.monotonic(), 0))[0]:
                fault = f"stopped after {item_seconds:g} seconds" if limit < end else "stopped: no time left"
                break
            if not (read := os.read(reading, 1 << 16)):
                break
            *lines, left = (left + read).split(b"\n")
            for message in map(json.loads, lines):
                if "begin" in message:
                    limit = min(time.monotonic() + item_seconds, end)
                yield message
    finally:
        os.close(reading)
        code = _ended(process, bool(fault))
    if not fault and code not in (0, _FAULTY):
        said.seek(max(said.tell() - _MOST_TEXT, 0))
        fault = f"the process ended with {code}: {said.read().decode(errors='replace')}"
    if fault:
        yield {"fault": fault}


def _ended(process: subprocess.Popen[bytes], is_stopped: bool) -> int | None:
    """The code of a process that ends now, with all that it has begun where it is stopped; None where it does not even then."""
    if not is_stopped:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_KILL_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        return process.wait(_KILL_SECONDS)
    return None


def work(measure: Callable[[str], Iterator[Line]], items: Sequence[str], key: str, writing: int) -> int:
    """A worker's part: measure items and say so; the first that fails ends it, as the GPU may be lost. Returns its code."""
    with os.fdopen(writing, "w", buffering=1) as pipe:
        for item in items:
            print(json.dumps({"begin": item}), file=pipe)
            try:
                for line in measure(item):
                    print(json.dumps({"line": line}), file=pipe)
            except Exception as fault:
                print(json.dumps({"line": {key: item, "fault": f"{type(fault).__name__}: {fault}"}}), file=pipe)
                return _FAULTY
    return 0
