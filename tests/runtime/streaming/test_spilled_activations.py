"""Programs whose activations leave memory for a scratch file: the same bits, and on every fault of it one error."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import prefuse
import pytest
from prefuse.runtime.errors import ScratchFileError
from prefuse.runtime.executor import CompiledModel, Context
from prefuse.runtime.plan import COMPUTE, SCRATCH, Copy, limit_of, planned_bytes
from prefuse.runtime.streaming import scratch
from prefuse.tests.models.skips import skip_chain, skip_input


@pytest.fixture(scope="module")
def free() -> CompiledModel:
    return compiled()


def compiled(rows: int = 1024, **options: object) -> CompiledModel:
    net = prefuse.compile(skip_chain(rows=rows), threads=2, **options)  # type: ignore[arg-type]
    assert isinstance(net, CompiledModel)
    return net


def load(path: Path) -> CompiledModel:
    net = prefuse.load(path)
    assert isinstance(net, CompiledModel)
    return net


def moves_of(net: CompiledModel) -> tuple[int, int]:
    """How often a call writes to its scratch file, and how often it reads from there."""
    spaces = {buffer.name: buffer.space for buffer in net.plan.buffers}
    copies = [step for step in net.plan.steps if isinstance(step, Copy) and step.stream != COMPUTE]
    outs = sum(spaces[step.destination.buffer] == SCRATCH for step in copies)
    return outs, sum(spaces[step.source.buffer] == SCRATCH for step in copies)


@contextmanager
def failing(function: str, number: int, code: int) -> Iterator[None]:
    """Call number `number`, from 0 on, of a function of `os` ends in an error."""
    real, count = getattr(os, function), iter(range(1 << 30))

    def called(*arguments: object) -> object:
        if next(count) == number:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    with mock.patch(f"os.{function}", called):
        yield


def test_the_same_bits_within_the_limit(spilled_file: Path, free: CompiledModel) -> None:
    net = load(spilled_file)
    outs, ins = moves_of(net)
    assert outs >= 2
    assert ins >= outs
    limit = limit_of(net.plan)
    assert limit is not None
    assert planned_bytes(net.plan) <= limit <= 0.61 * planned_bytes(free.plan)
    for seed in range(5):
        np.testing.assert_array_equal(net(skip_input(seed)), free(skip_input(seed)))


@pytest.mark.parametrize("limit", ["95%", "75%"])
def test_rows_that_fill_no_pages(limit: str) -> None:
    """What begins or ends within a page goes out with all of it, and nothing beside it changes."""
    rows, pipeline = 517, prefuse.compiler.pipeline.pass_table.DEFAULT_PIPELINE
    copying = pipeline.replace("schedule-prefetch", "schedule-prefetch{repeats=false}")
    free, net = compiled(rows), compiled(rows, memory_limit=limit, pipeline=copying)
    again = compiled(rows, memory_limit=limit)
    assert moves_of(net)[0] >= 1
    assert moves_of(again) == (0, 0), "what takes less time to compute again is not copied"
    assert planned_bytes(again.plan) <= float(limit[:-1]) / 100 * planned_bytes(free.plan)
    x = skip_input(rows=rows)
    for _ in range(2):
        np.testing.assert_array_equal(net(x), free(x))
        np.testing.assert_array_equal(again(x), free(x))


def test_on_demand_has_the_same_bits(free: CompiledModel) -> None:
    pipeline = prefuse.compiler.pipeline.pass_table.DEFAULT_PIPELINE
    net = compiled(memory_limit="60%", pipeline=pipeline.replace("schedule-prefetch", "schedule-prefetch{on-demand=true}"))
    assert moves_of(net)[0] >= 2
    np.testing.assert_array_equal(net(skip_input()), free(skip_input()))


def test_contexts_on_threads_keep_apart(spilled_file: Path, free: CompiledModel) -> None:
    net = load(spilled_file)
    answers = [np.asarray(free(skip_input(seed))) for seed in range(4)]

    def call(seed: int) -> bool:
        return all(np.array_equal(np.asarray(net(skip_input(seed))), answers[seed]) for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(4)))


def test_a_forked_process_has_a_file_of_its_own(spilled_file: Path, free: CompiledModel) -> None:
    """A child that calls a context of its parent, while the parent does so, too."""
    session, answers = load(spilled_file).context(), [np.asarray(free(skip_input(seed))) for seed in range(2)]
    assert _is_right(session, 0, answers[0])
    child = os.fork()
    if not child:
        status = 1
        try:
            status = int(not all(_is_right(session, 1, answers[1]) for _ in range(20)))
        finally:
            os._exit(status)
    try:
        assert all(_is_right(session, 0, answers[0]) for _ in range(20))
    finally:
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def _is_right(session: Context, seed: int, answer: np.ndarray) -> bool:
    return np.array_equal(np.asarray(session(skip_input(seed))), answer)


@pytest.mark.parametrize(("function", "what"), [("pwritev", "written: No space left"), ("preadv", "read back: Input/output")])
def test_each_failing_copy_is_one_error_and_the_next_call_is_right(
    spilled_file: Path, free: CompiledModel, function: str, what: str
) -> None:
    net = load(spilled_file)
    answer = free(skip_input())
    np.testing.assert_array_equal(net(skip_input()), answer)
    gc.collect()
    before, count = (threading.active_count(), len(os.listdir("/proc/self/fd"))), moves_of(net)[function == "preadv"]
    assert count >= 2
    for number in range(3 * count):
        code = errno.ENOSPC if function == "pwritev" else errno.EIO
        failure = pytest.raises(ScratchFileError, match=f"activations cannot be {what}")
        with failing(function, number % count, code), failure as error:
            net(skip_input())
        assert not error.value.is_before_run
        np.testing.assert_array_equal(net(skip_input()), answer)
    gc.collect()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_a_full_disk_is_one_error_before_anything_runs(spilled_file: Path, free: CompiledModel) -> None:
    net = load(spilled_file)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("os.posix_fallocate", side_effect=full), pytest.raises(ScratchFileError, match="No space left") as error:
        net(skip_input())
    assert error.value.is_before_run
    np.testing.assert_array_equal(net(skip_input()), free(skip_input()))


def test_where_the_programs_folder_takes_no_file_it_is_a_temporary_one(spilled_file: Path, free: CompiledModel) -> None:
    net = load(spilled_file)
    with failing("posix_fallocate", 0, errno.EROFS):
        np.testing.assert_array_equal(net(skip_input()), free(skip_input()))


@pytest.mark.parametrize("refused", ["_O_DIRECT", "os.O_TMPFILE"])
def test_file_systems_that_know_no_such_files(spilled_file: Path, free: CompiledModel, refused: str) -> None:
    with mock.patch(f"prefuse.runtime.streaming.scratch.{refused}", 0):
        net = load(spilled_file)
        for seed in range(2):
            np.testing.assert_array_equal(net(skip_input(seed)), free(skip_input(seed)))


def test_a_file_system_that_gives_no_room_past_the_cache(spilled_file: Path, free: CompiledModel) -> None:
    """There the C library writes single bytes, which such a file refuses: then it is one in the cache."""
    net = load(spilled_file)
    with failing("posix_fallocate", 0, errno.EINVAL), mock.patch("os.fdatasync", wraps=os.fdatasync) as synced:
        np.testing.assert_array_equal(net(skip_input()), free(skip_input()))
    assert synced.called == bool(scratch._O_DIRECT)


def test_activations_that_do_not_get_to_the_disk_are_one_error(spilled_file: Path, free: CompiledModel) -> None:
    """Pages that cannot be written are dropped: nobody may read them back."""
    with mock.patch("prefuse.runtime.streaming.scratch._O_DIRECT", 0):
        net = load(spilled_file)
        for _ in range(2):
            with failing("fdatasync", 0, errno.EIO), pytest.raises(ScratchFileError, match="cannot be written: Input/output"):
                net(skip_input())
            np.testing.assert_array_equal(net(skip_input()), free(skip_input()))


def test_files_are_gone_with_their_contexts(spilled_file: Path) -> None:
    net = load(spilled_file)
    net(skip_input())
    gc.collect()
    before, names = len(os.listdir("/proc/self/fd")), set(spilled_file.parent.iterdir())
    sessions = [net.context() for _ in range(3)]
    for session in sessions:
        session(skip_input())
    assert len(os.listdir("/proc/self/fd")) == before + 3
    assert set(spilled_file.parent.iterdir()) == names
    sessions.clear()
    del session
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
