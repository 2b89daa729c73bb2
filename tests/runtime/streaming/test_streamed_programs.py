"""Programs that copy weights from their file: the same bits, and on every fault of the file one error, never wrong numbers."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE
from prefuse.runtime.errors import DeviceError, InputError, ProgramFileError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import COMPUTE, PAGE, Copy
from prefuse.runtime.streaming.events import Events
from prefuse.runtime.streaming.storage import StorageError
from prefuse.runtime.streams import slot_copies
from prefuse.tests.models.chains import chain_input
from prefuse.tests.runtime.changed_archives import with_text

PIPELINE = DEFAULT_PIPELINE.replace("reassociate-product,", "")  # which would make one product of all


@pytest.fixture
def own_file(limited_file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(limited_file, tmp_path / "own.prefuse"))


def load(path: Path) -> CompiledModel:
    net = prefuse.load(path)
    assert isinstance(net, CompiledModel)
    return net


def copies_of(net: CompiledModel) -> int:
    return sum(isinstance(step, Copy) and step.stream != COMPUTE for step in net.plan.steps)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def failing_read(number: int) -> Iterator[None]:
    """Read number `number`, from 0 on, of those made inside ends in an error."""
    real, count = os.preadv, iter(range(1 << 30))

    def preadv(*arguments: object) -> int:
        if next(count) == number:
            raise OSError(5, "Input/output error")
        return real(*arguments)  # type: ignore[arg-type]

    with mock.patch("os.preadv", preadv):
        yield


def test_the_same_bits_as_without_a_limit(limited_file: Path, answer: np.ndarray) -> None:
    net = load(limited_file)
    assert copies_of(net) > 2
    for _ in range(5):
        np.testing.assert_array_equal(net(chain_input()), answer)


def test_what_it_takes_is_within_the_limit(limited_file: Path) -> None:
    net = load(limited_file)
    taken = net.plan.space("arena").size_bytes + net.plan.weights_bytes
    assert taken <= 0.6 * 5 * 256 * 256 * 4 * 1.1
    assert net.plan.space("storage").size_bytes >= 3 * 256 * 256 * 4


def test_contexts_on_threads_keep_apart(limited_file: Path, answer: np.ndarray) -> None:
    net = load(limited_file)

    def call(_: int) -> bool:
        return all(np.array_equal(np.asarray(net(chain_input())), answer) for _ in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(4)))


def test_a_failing_read_is_one_error_and_the_next_call_is_right(limited_file: Path, answer: np.ndarray) -> None:
    net = load(limited_file)
    net(chain_input())
    gc.collect()
    before = threading.active_count(), descriptors()
    for number in range(100):
        with failing_read(number % copies_of(net)), pytest.raises(ProgramFileError, match="weights cannot be read: Input/output"):
            net(chain_input())
        np.testing.assert_array_equal(net(chain_input()), answer)
    assert (threading.active_count(), descriptors()) == before


def test_without_threads_for_copies_a_call_is_one_error_and_the_next_is_right(limited_file: Path, answer: np.ndarray) -> None:
    net = load(limited_file)
    refusal = RuntimeError("can't start new thread")
    with mock.patch("threading.Thread.start", side_effect=refusal), pytest.raises(DeviceError, match="can't start") as error:
        net(chain_input())
    assert error.value.is_before_run
    np.testing.assert_array_equal(net(chain_input()), answer)


def test_weights_for_the_next_call_are_read_anew_after_a_failing_one(limited_file: Path, answer: np.ndarray) -> None:
    net = load(limited_file)
    session, copies, slots = net.context(), copies_of(net), len(slot_copies(net.plan))
    assert 0 < slots < copies
    for expected in (copies + slots, copies, copies):
        assert reads_of(lambda: np.testing.assert_array_equal(session(chain_input()), answer)) == expected
    with failing_read(copies - 1), pytest.raises(ProgramFileError):
        session(chain_input())
    for expected in (copies + slots, copies):
        assert reads_of(lambda: np.testing.assert_array_equal(session(chain_input()), answer)) == expected


def reads_of(call: Callable[[], object]) -> int:
    """How often a call reads the file."""
    with mock.patch("os.preadv", wraps=os.preadv) as read:
        call()
    return read.call_count


def test_a_first_call_that_cannot_fill_its_slots_is_one_error(limited_file: Path, answer: np.ndarray) -> None:
    net = load(limited_file)
    with failing_read(0), pytest.raises(ProgramFileError, match="weights cannot be read: Input/output"):
        net(chain_input())
    np.testing.assert_array_equal(net(chain_input()), answer)


def test_short_reads_go_on(limited_file: Path, answer: np.ndarray) -> None:
    net, real = load(limited_file), os.preadv

    def preadv(file: int, buffers: list[memoryview], offset: int) -> int:
        return real(file, [buffers[0][: 3 * PAGE]], offset)

    with mock.patch("os.preadv", preadv):
        np.testing.assert_array_equal(net(chain_input()), answer)


def test_a_file_that_is_cut_short_raises(own_file: Path) -> None:
    net = load(own_file)
    os.truncate(own_file, own_file.stat().st_size // 3)
    for _ in range(2):
        with pytest.raises(ProgramFileError, match="it has been cut short"):
            net(chain_input())


def test_changed_weights_raise_before_and_after_their_first_copy(own_file: Path, answer: np.ndarray) -> None:
    net, later = load(own_file), load(own_file)
    np.testing.assert_array_equal(later(chain_input()), answer)
    storage = net.program.storage
    assert storage is not None
    with open(own_file, "r+b") as file:
        for offset in storage.constants:
            file.seek(storage.start + offset + 100)
            file.write(b"\xff" * 8)
    for one in (net, later):
        with pytest.raises(ProgramFileError, match="are not those that were written"):
            one(chain_input())


def test_changed_weights_are_found_when_they_are_read(own_file: Path) -> None:
    """Also those that have been right before: by the end of the call the file may be right again."""
    net = load(own_file)
    net(chain_input())
    storage = net.program.storage
    assert storage is not None
    stored = next(iter(storage.constants.values()))
    memory = memoryview(mmap.mmap(-1, stored.size_bytes))
    storage.read(stored.offset, memory)
    with open(own_file, "r+b") as file:
        file.seek(storage.start + stored.offset)
        file.write(b"\xff" * 8)
    with pytest.raises(StorageError, match="are not those that were written"):
        storage.read(stored.offset, memory)


def test_reading_it_all_again_takes_little_memory(own_file: Path, answer: np.ndarray, tmp_path: Path) -> None:
    net = load(own_file)
    np.testing.assert_array_equal(net(chain_input()), answer)
    os.utime(own_file)
    with (
        mock.patch("prefuse.runtime.streaming.storage.CHUNK_BYTES", 8 * PAGE),
        mock.patch("prefuse.runtime.streaming.storage.mmap.mmap", wraps=mmap.mmap) as taken,
    ):
        np.testing.assert_array_equal(net(chain_input()), answer)
        net.save(tmp_path / "again.prefuse")
    assert [call.args[1] for call in taken.call_args_list] == [8 * PAGE] * 2
    assert (tmp_path / "again.prefuse").read_bytes() == own_file.read_bytes()


def test_new_times_alone_are_no_fault(own_file: Path, answer: np.ndarray) -> None:
    net = load(own_file)
    for _ in range(3):
        os.utime(own_file)
        np.testing.assert_array_equal(net(chain_input()), answer)


def test_a_deleted_or_replaced_file_goes_on(own_file: Path, answer: np.ndarray, tmp_path: Path) -> None:
    net = load(own_file)
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    os.replace(other, own_file)
    np.testing.assert_array_equal(net(chain_input()), answer)
    own_file.unlink()
    np.testing.assert_array_equal(net(chain_input()), answer)


@pytest.mark.parametrize("refuses", ["open", "read"])
def test_a_file_system_without_direct_reads(limited_file: Path, answer: np.ndarray, refuses: str) -> None:
    target = "prefuse.runtime.streaming.storage._O_DIRECT" if refuses == "open" else "prefuse.runtime.streaming.storage._reads"
    with mock.patch(target, 0 if refuses == "open" else lambda _: False):
        net = load(limited_file)
    assert net.program.storage is not None
    assert not net.program.storage.is_direct
    np.testing.assert_array_equal(net(chain_input()), answer)


def test_memory_file_system(limited_file: Path, answer: np.ndarray) -> None:
    path = Path("/dev/shm") / f"prefuse-test-{os.getpid()}.prefuse"
    shutil.copy(limited_file, path)
    try:
        np.testing.assert_array_equal(load(path)(chain_input()), answer)
    finally:
        path.unlink()


def test_saved_again_it_is_the_same_file(limited_file: Path, tmp_path: Path, answer: np.ndarray) -> None:
    load(limited_file).save(tmp_path / "again.prefuse")
    assert (tmp_path / "again.prefuse").read_bytes() == limited_file.read_bytes()
    np.testing.assert_array_equal(load(tmp_path / "again.prefuse")(chain_input()), answer)


def test_signals_in_a_call_do_not_end_its_waits(limited_file: Path, answer: np.ndarray) -> None:
    net = load(limited_file)
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: seen.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        while len(seen) < 20:
            np.testing.assert_array_equal(net(chain_input()), answer)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_leaves_nothing_behind(limited_file: Path, answer: np.ndarray) -> None:
    """What is raised before the kernels ran: their threads end, and the next call is right."""
    net = load(limited_file)
    context = net.context()
    context(chain_input())
    invocation = context._invocation
    before = threading.active_count()
    with mock.patch.object(invocation, "_function", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        context(chain_input())
    assert threading.active_count() == before
    np.testing.assert_array_equal(context(chain_input()), answer)


def test_an_interrupted_start_leaves_no_thread_behind(limited_file: Path, answer: np.ndarray) -> None:
    """Ctrl-C when a thread runs already, but its start has not returned."""
    context = load(limited_file).context()
    context(chain_input())
    real_start, real_wait, has_begun = threading.Thread.start, Events.wait, threading.Event()

    def start(thread: threading.Thread) -> None:
        real_start(thread)
        assert has_begun.wait(10)
        raise KeyboardInterrupt

    def wait(events: Events, number: int) -> None:
        has_begun.set()
        real_wait(events, number)
        time.sleep(0.2)

    before = threading.active_count()
    with (
        mock.patch.object(threading.Thread, "start", start),
        mock.patch.object(Events, "wait", wait),
        pytest.raises(KeyboardInterrupt),
    ):
        context(chain_input())
    assert threading.active_count() == before
    np.testing.assert_array_equal(context(chain_input()), answer)


@pytest.mark.parametrize("place", ["move", "times"])
def test_whatever_ends_a_copy_is_raised(limited_file: Path, answer: np.ndarray, place: str) -> None:
    """Errors of any kind, and of anything that its thread does."""
    context = load(limited_file).context()
    context(chain_input())
    raised: list[BaseException] = []

    def call() -> None:
        try:
            context(chain_input())
        except BaseException as error:
            raised.append(error)

    target = "storage.Storage.read" if place == "move" else "copier.CopyTime"
    thread = threading.Thread(target=call, daemon=True)
    with mock.patch(f"prefuse.runtime.streaming.{target}", side_effect=SystemExit):
        thread.start()
        thread.join(10)
    assert not thread.is_alive()
    assert [type(error) for error in raised] == [SystemExit]
    np.testing.assert_array_equal(context(chain_input()), answer)


def test_states_are_lost_in_a_call_that_fails_and_said_to_be() -> None:
    """A product renews the state, and the weights of another fail to come: nobody may go on with what is there then."""
    columns = 256
    rng = np.random.default_rng(0)
    body = "t = Add(s, x)  a = MatMul(t, w0)  b = MatMul(a, w1)  c = MatMul(b, w2)  d = Relu(c)  y = MatMul(d, w3)"
    kind = f"float[3,{columns}]"
    text = f'<ir_version: 8, opset_import: ["": 18]> main ({kind} x, {kind} s) => ({kind} y, {kind} t) {{ {body} }}'
    arrays = {f"w{index}": rng.standard_normal((columns, columns), np.float32) for index in range(4)}
    model = ir.from_onnx_text(text, initializers=[ir.tensor(array, name=name) for name, array in arrays.items()])
    free, net = (
        prefuse.compile(model, states={"t": "s"}, threads=2, memory_limit=limit, pipeline=PIPELINE) for limit in (None, "80%")
    )
    assert isinstance(free, CompiledModel)
    assert isinstance(net, CompiledModel)
    assert copies_of(net) > 0
    x, session, other = rng.standard_normal((3, columns), np.float32), net.context(), free.context()
    np.testing.assert_array_equal(session(x), other(x))
    with failing_read(0), pytest.raises(ProgramFileError):
        session(x)
    with pytest.raises(InputError, match="lost in a call that failed: s"):
        session(x)
    with pytest.raises(InputError, match="lost in a call that failed: s"):
        session.states["s"]
    with pytest.raises(InputError, match="lost in a call that failed: s"):
        session.states.save(Path("never.npz"))
    session.states["s"] = other.states["s"]
    np.testing.assert_array_equal(session(x), other(x))
    np.testing.assert_array_equal(session.states["s"], other.states["s"])


def _answer_of(path: Path) -> np.ndarray:
    result = prefuse.load(path)(chain_input())
    assert isinstance(result, np.ndarray)
    return result


def test_processes_share_a_file(limited_file: Path, answer: np.ndarray) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for result in pool.map(_answer_of, [limited_file] * 2):
            np.testing.assert_array_equal(result, answer)


def test_a_wrong_checksum_in_the_manifest(own_file: Path) -> None:
    net = load(own_file)
    assert net.program.storage is not None
    checksum = next(iter(net.program.storage.constants.values())).checksum.encode()
    own_file.write_bytes(with_text(own_file.read_bytes(), checksum, b"0" * len(checksum)))
    with pytest.raises(ProgramFileError, match="are not those that were written"):
        load(own_file)(chain_input())
