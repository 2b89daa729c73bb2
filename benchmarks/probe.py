"""How fast the machine's cores are at this moment.

A virtual machine may be given two cores of its own now and two threads of one core a minute later. A process for each thread
multiplies small matrices; together they tell which of the two it is, and no thread of theirs spins afterwards.
"""

from __future__ import annotations

import os
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np

_SIDE = 192  # of the matrices: three of them fit the second-level cache
_SECONDS = 0.03
_SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Probe:
    """`threads` processes, each with one thread."""

    def __init__(self, threads: int) -> None:
        context = get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        before = dict(os.environ)
        os.environ |= _SINGLE_THREADED
        try:
            for _ in range(threads):
                near, far = context.Pipe()
                process = context.Process(target=_serve, args=(far,), daemon=True)
                process.start()
                far.close()
                self._connections.append(near)
                self._processes.append(process)
        finally:
            os.environ.clear()
            os.environ.update(before)
        for connection in self._connections:
            connection.recv()  # it is ready

    def gflops(self) -> float:
        """Arithmetic of all threads at once, in 1e9 float32 operations a second."""
        begin = time.perf_counter() + 0.002
        for connection in self._connections:
            connection.send(begin)
        return sum(float(connection.recv()) for connection in self._connections)

    def stop(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.send(None)
            process.join(timeout=10)
            process.kill()


def _serve(connection: Connection) -> None:
    a = np.ones((_SIDE, _SIDE), np.float32)
    result = a @ a
    connection.send("ready")
    while (begin := connection.recv()) is not None:
        while time.perf_counter() < begin:
            pass
        products = 0
        while (now := time.perf_counter()) < begin + _SECONDS:
            np.matmul(a, a, out=result)
            products += 1
        connection.send(products * 2 * _SIDE**3 / (now - begin) / 1e9)
