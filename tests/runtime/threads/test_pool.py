"""Pools of worker threads: regions wait for no worker that is late, and pools end with their threads, in forks and at exit."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import prefuse
import pytest
import torch
from prefuse.runtime.cpu_device import CpuExecutable
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.threads import pool
from prefuse.tests.models.chains import ROWS, product_chain

_ROWS, _WIDTH = ROWS, 512


@cache
def compiled(threads: int) -> CompiledModel:
    """Products that several threads share."""
    model = prefuse.compile(product_chain(4, _WIDTH), threads=threads, cache=False)
    assert isinstance(model, CompiledModel)
    return model


@pytest.fixture(scope="module")
def net() -> CompiledModel:
    model = compiled(3)
    assert isinstance(model._executable, CpuExecutable)
    assert model._executable.pool_user.needs_threads
    return model


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((_ROWS, _WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def answer(x: np.ndarray) -> np.ndarray:
    return np.asarray(compiled(1)(x))


def in_new_thread(work: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


def workers() -> int:
    return len(os.listdir("/proc/self/task"))


class _NoWorkers:
    """The C library, whose threads never run: as if their cores were always others'."""

    def __init__(self, error: int = 0) -> None:
        self.started: list[int] = []
        self.error = error
        self.aligned_alloc, self.free = pool._libc().aligned_alloc, pool._libc().free

    def pthread_create(self, worker: object, attributes: None, code: object, line: int) -> int:
        self.started.append(line)
        return self.error

    def pthread_tryjoin_np(self, worker: ctypes.c_ulong, result: None) -> int:
        return 0


def test_a_call_needs_no_worker(net: CompiledModel, x: np.ndarray, answer: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    none = _NoWorkers()
    monkeypatch.setattr(pool, "_libc", lambda: none)
    found = in_new_thread(lambda: [np.array_equal(np.asarray(net(x)), answer) for _ in range(3)])
    assert found == [True] * 3
    assert len(none.started) == 2


def test_threads_that_the_system_does_not_give(
    net: CompiledModel, x: np.ndarray, answer: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = _NoWorkers(error=11)
    monkeypatch.setattr(pool, "_libc", lambda: none)
    with pytest.warns(RuntimeWarning, match="the system starts no more threads .*: calls of this one run on 1 of 3"):
        assert in_new_thread(lambda: np.array_equal(np.asarray(net(x)), answer))


def test_workers_compute_and_sleep_between_calls(net: CompiledModel, x: np.ndarray, answer: np.ndarray) -> None:
    """Their tasks find them awake, about to sleep, and asleep; then they take no time."""
    for pause in [0, 1e-4, 1e-3, 3e-3, 2e-2] * 20:
        time.sleep(pause)
        np.testing.assert_array_equal(np.asarray(net(x)), answer)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.1


def test_workers_end_with_their_thread(net: CompiledModel, x: np.ndarray, answer: np.ndarray) -> None:
    net(x)
    before = workers()
    seen: list[int] = []

    def call() -> bool:
        is_right = np.array_equal(np.asarray(net(x)), answer)
        seen.append(workers())
        return is_right

    for _ in range(20):
        assert in_new_thread(call)
        gc.collect()
    assert min(seen) >= before + 3
    assert workers() <= before + 1  # the executor's thread may be about to end


def test_all_threads_round_as_the_caller_does(net: CompiledModel, x: np.ndarray) -> None:
    """Denormal numbers are zeros for workers, too, where the caller has said so after they were started."""
    small, one = (x * 1e-39).astype(np.float32), compiled(1)
    net(small)
    for is_flushed in (True, False):
        assert torch.set_flush_denormal(is_flushed)
        try:
            wanted = np.asarray(one(small)).view(np.int32)  # for comparisons take denormal numbers for zeros, too
            assert wanted.any() != is_flushed
            for _ in range(50):
                np.testing.assert_array_equal(np.asarray(net(small)).view(np.int32), wanted)
        finally:
            torch.set_flush_denormal(False)


def test_many_threads_at_once(net: CompiledModel, x: np.ndarray, answer: np.ndarray) -> None:
    def call(_: int) -> bool:
        return all(np.array_equal(np.asarray(net(x)), answer) for _ in range(100))

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(call, range(12)))


def test_programs_of_several_threads_in_turns(net: CompiledModel, x: np.ndarray, answer: np.ndarray) -> None:
    for _ in range(50):
        for one in (net, compiled(2), compiled(5)):
            np.testing.assert_array_equal(np.asarray(one(x)), answer)


def test_a_forked_process_has_workers_of_its_own(net: CompiledModel, x: np.ndarray, answer: np.ndarray) -> None:
    net(x)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(not all(np.array_equal(np.asarray(net(x)), answer) for _ in range(20)) or workers() != 3)
        finally:
            os._exit(status)
    try:
        assert all(np.array_equal(np.asarray(net(x)), answer) for _ in range(20))
    finally:
        _, ended = os.waitpid(child, 0)
    assert ended == 0


_EXIT = """
import atexit
atexit.register(lambda: net(x))  # before that of prefuse, so that it is called after it
import sys, threading, numpy as np, prefuse
net, x = prefuse.load(sys.argv[1]), np.ones(({rows}, {width}), np.float32)
def forever():
    while True:
        net(x)
for _ in range(2):
    threading.Thread(target=forever, daemon=True).start()
for _ in range(50):
    net(x)
"""


def test_a_process_ends_while_threads_call(net: CompiledModel, tmp_path: Path) -> None:
    net.save(tmp_path / "net.prefuse")
    script = _EXIT.format(rows=_ROWS, width=_WIDTH)
    for _ in range(5):
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "net.prefuse")], check=True, timeout=60)


_SILENCE = """
import numpy as np, onnx.parser, prefuse
text = '<ir_version: 10, opset_import: ["": 21]> g (float[512,512] x) => (float[512,512] r) { r = Softmax(x) }'
net = prefuse.compile(onnx.parser.parse_model(text), threads=2, cache=False)
net(np.ones((512, 512), np.float32))
del net  # but not the library, whose code workers run
"""


def test_a_process_ends_in_silence() -> None:
    result = subprocess.run([sys.executable, "-c", _SILENCE], check=True, timeout=60, capture_output=True, text=True)
    assert result.stdout + result.stderr == ""


def test_a_pool_outlives_the_program_that_made_it(x: np.ndarray, answer: np.ndarray) -> None:
    """Workers run the code of a library that stays."""

    def call() -> bool:
        right = True
        for count in (2, 3):
            first = prefuse.compile(product_chain(4, _WIDTH), threads=count, cache=False)
            right &= np.array_equal(np.asarray(first(x)), answer)
            del first
            gc.collect()
        return right

    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(call())) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert results == [True, True]
