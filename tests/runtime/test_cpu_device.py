"""Programs on the CPU: what loading maps, worker threads, processes, and native code that cannot run."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
from prefuse.runtime import cpu_device, native
from prefuse.runtime.errors import ProgramFileError
from prefuse.runtime.executor import CompiledModel, load
from prefuse.runtime.plan import Buffer, Role, Space
from prefuse.runtime.program_file import read_program
from prefuse.tests.runtime.tiny_program import ELEMENTS


def test_calls_leave_the_affinity_of_the_thread_alone(tiny: CompiledModel, x: np.ndarray) -> None:
    """TVM by itself pins the calling thread."""
    seen: list[set[int]] = []

    def work() -> None:
        seen.append(os.sched_getaffinity(0))
        tiny(x)
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[0] == seen[1]


def test_weights_and_a_small_arena_are_there_before_the_first_call(tiny_file: Path) -> None:
    """Pages are mapped when a model is loaded; who only reads a program pays for none of them."""
    assert resident_bytes(read_program(tiny_file).constants.ctypes.data) <= 1 << 16  # what reading its neighbours has mapped
    model = load(tiny_file)
    weights = model.program.constants
    assert resident_bytes(weights.ctypes.data) >= weights.nbytes
    (context,) = model._idle
    arena = context._invocation
    assert arena is not None
    assert resident_bytes(arena._arena.address) >= model._arena_bytes  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def serial_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program without parallel regions."""
    path = tmp_path_factory.mktemp("serial") / "serial.prefuse"
    text = '<ir_version: 10, opset_import: ["": 21]> main (float[1000] x) => (float[1000] y) { y = Neg(x) }'
    prefuse.compile(ir.from_onnx_text(text), threads=2, cache=False).save(path)
    return path


def test_a_quick_program_runs_once_when_it_is_loaded(tiny_file: Path, serial_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that needs threads does not: their pool is made by the first call of each thread. Nor does one with much to do."""
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(cpu_device.CpuInvocation, "__call__", lambda self, *addresses: calls.append(addresses))
    load(serial_file)
    assert len(calls) == 1
    load(tiny_file)
    assert len(calls) == 1
    program = read_program(serial_file)
    large = tuple(replace(kernel, flops=10**8) for kernel in program.plan.kernels)
    CompiledModel(replace(program, plan=replace(program.plan, kernels=large)))
    assert len(calls) == 1


def test_a_first_call_touches_no_page_for_the_first_time(serial_file: Path) -> None:
    script = """
import numpy as np, prefuse, resource, sys
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
x = np.ones(1000, np.float32)
model = prefuse.load(sys.argv[1])
before = faults()
before = faults()
y = model(x)
print(faults() - before)
"""
    command = [sys.executable, "-c", script, str(serial_file)]
    assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) == 0


@pytest.mark.parametrize(("mebibytes", "is_ready"), [(8, True), (64, False)])
def test_pages_of_a_large_arena_are_provided_when_they_are_touched(mebibytes: int, is_ready: bool) -> None:
    arena = cpu_device.CpuArena(mebibytes << 20)
    assert (resident_bytes(arena.address) >= mebibytes << 20) == is_ready


@pytest.mark.parametrize(("part_kib", "most_mib"), [(256, 1), (4 << 10, 1), (16 << 10, 8)])
def test_parts_that_grow_take_pages_as_they_do(part_kib: int, most_mib: int) -> None:
    """Large pages only where a part has several: else the first rows of parts would provide it all."""
    arena = cpu_device.CpuArena(64 << 20, part_kib << 10)
    before = resident_bytes(arena.address)
    for begin in range(0, 64 << 20, part_kib << 10):
        arena.write(begin, np.ones(64, np.uint8))
    assert resident_bytes(arena.address) - before <= most_mib << 20


def resident_bytes(address: int) -> int:
    """Of the mapping of this process in which an address lies, the bytes that are in memory and mapped."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(bound, 16) for bound in words[0].split("-"))
            inside = begin <= address < end
        elif inside and words[0] == "Rss:":
            return 1024 * int(words[1])
    raise AssertionError(f"{address:#x} is not mapped")


def test_a_program_without_parallel_regions_starts_no_threads(tiny_file: Path, serial_file: Path) -> None:
    script = """
import numpy as np, os, prefuse, sys
before = len(os.listdir("/proc/self/task"))
prefuse.load(sys.argv[1])(np.zeros(1000, np.float32))
print(len(os.listdir("/proc/self/task")) - before)
"""

    def started(path: Path) -> int:
        command = [sys.executable, "-c", script, str(path)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert started(serial_file) == 0
    assert started(tiny_file) > 0


def test_workers_go_to_sleep_soon_after_a_call(tiny_file: Path) -> None:
    """By TVM's own choice they look for work for 0.1 s of processor time."""
    script = """
import numpy as np, os, prefuse, sys, time
model = prefuse.load(sys.argv[1])
def used():
    tasks = [int(task) for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
    return sum(int(open(f"/proc/self/task/{task}/schedstat").read().split()[0]) for task in tasks)
model(np.zeros(1000, np.float32))
before = used()
time.sleep(0.5)
print((used() - before) / 1e6)
"""
    command = [sys.executable, "-c", script, str(tiny_file)]
    assert float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) < 12


def test_arenas_in_several_memories_are_refused(tiny_file: Path) -> None:
    program = read_program(tiny_file)
    other = Buffer("g", Role.ACTIVATION, 64, "device", 0)
    plan = replace(program.plan, buffers=(*program.plan.buffers, other), spaces=(*program.plan.spaces, Space("device", 64)))
    with pytest.raises(ProgramFileError, match="activations in 2 memories: arena, device"):
        CompiledModel(replace(program, plan=plan))


def test_library_that_cannot_be_loaded(tiny_file: Path) -> None:
    program = read_program(tiny_file)
    with pytest.raises(ProgramFileError, match=r"library\.so: cannot be loaded"):
        CompiledModel(replace(program, library=b"junk"))


def test_a_library_without_the_host_function(tiny_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_device, "MAIN", "prefuse_other")
    with pytest.raises(ProgramFileError, match=r"library\.so: it has no function prefuse_other"):
        load(tiny_file)


def test_failures_of_the_runtime_are_reported() -> None:
    with pytest.raises(native.NativeError, match=r"no function 'prefuse\.absent'"):
        native.global_function("prefuse.absent")
    with pytest.raises(native.NativeError, match="cannot open shared object"):
        native.Library(Path("absent.so"), ())


def test_a_library_goes_with_its_model(serial_file: Path) -> None:
    """Its code is mapped from a file that is gone, so it is found by its address. That of one with parallel regions may be what
    worker threads run, and stay."""
    model = load(serial_file)
    context = model._idle[0]
    address = ctypes.cast(context._invocation._function, ctypes.c_void_p).value  # type: ignore[union-attr]
    assert address is not None
    assert resident_bytes(address) > 0
    del model, context
    gc.collect()
    with pytest.raises(AssertionError, match="is not mapped"):
        resident_bytes(address)


def test_loading_imports_neither_torch_nor_tvm(tiny_file: Path) -> None:
    script = f"""
import sys
from prefuse.runtime.executor import load
import numpy as np
load({str(tiny_file)!r})(np.zeros({ELEMENTS}, np.float32))
print(sorted({{"torch", "tvm", "tvm_ffi", "onnx", "onnx_ir"}} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
