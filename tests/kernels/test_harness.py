"""That the harness notices what a kernel must not do, whether or not its threads happen to meet."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from prefuse.compiler.lowering import native
from prefuse.kernels.codegen.builder import Buffer, Expr, KernelBuilder
from prefuse.kernels.template.contract import BuiltKernel, Operand
from prefuse.runtime.target import Target

from . import harness
from .harness import check, forget_libraries, operator

LENGTH, TARGET = 64, Target("cpu", "avx2", 2)
HALF = LENGTH // TARGET.threads
Body = Callable[[KernelBuilder, Buffer, Buffer, Expr], None]


def kernel(body: Body) -> BuiltKernel:
    """A parallel region of two tasks, in each of which `body(builder, x, y, task)` runs."""
    builder = KernelBuilder(TARGET.machine, TARGET.threads)
    x, y = (builder.parameter(name, LENGTH, "float32") for name in ("x0", "y0"))
    with builder.loop(TARGET.threads, "parallel", "task") as task:
        body(builder, x, y, task)
    return BuiltKernel("made", builder.function(), (Operand("x0"),), builder.workspace_bytes)


def negated(builder: KernelBuilder, x: Buffer, y: Buffer, task: Expr) -> None:
    """Each task its half. Both store the two elements between them, which none reads: the same numbers in the end."""
    with builder.loop(HALF + 1) as i:
        builder.store(y, task * (HALF - 1) + i, -x[task * (HALF - 1) + i])


def in_scratch(builder: KernelBuilder, x: Buffer, y: Buffer, task: Expr, pitch: int) -> None:
    """Each task its half through scratch of its own, `pitch` elements behind that of the task before."""
    scratch = builder.workspace(LENGTH, "float32")
    with builder.loop(HALF) as i:
        builder.store(scratch, task * pitch + i, -x[task * HALF + i])
    with builder.loop(HALF) as i:
        builder.store(y, task * HALF + i, scratch[task * pitch + i])


def apart(builder: KernelBuilder, x: Buffer, y: Buffer, task: Expr) -> None:
    in_scratch(builder, x, y, task, HALF)


def too_near(builder: KernelBuilder, x: Buffer, y: Buffer, task: Expr) -> None:
    """The first element of a task's scratch is the last of another's."""
    in_scratch(builder, x, y, task, HALF - 1)


def twice_in_place(builder: KernelBuilder, x: Buffer, y: Buffer, task: Expr) -> None:
    """The elements between the tasks wait in the result while they are computed, where the other task puts its own."""
    with builder.loop(HALF + 1) as i:
        builder.store(y, task * (HALF - 1) + i, x[task * (HALF - 1) + i] + 1.0)
    with builder.loop(HALF + 1) as i:
        builder.store(y, task * (HALF - 1) + i, 1.0 - y[task * (HALF - 1) + i])


def before_it_reads(builder: KernelBuilder, x: Buffer, y: Buffer, task: Expr) -> None:
    """Each task stores its first element before it reads that of the operand again."""
    first = builder.name(x[task * HALF])
    with builder.loop(HALF) as i:
        builder.store(y, task * HALF + i, first - x[task * HALF + i] - x[task * HALF])


def reads_the_other(builder: KernelBuilder, x: Buffer, y: Buffer, task: Expr) -> None:
    """The second task needs what the first one stores last."""
    with builder.loop(HALF) as i:
        builder.store(y, task * HALF + i, -x[task * HALF + i])
    with builder.when(task == 1):
        builder.store(y, HALF, y[HALF - 1] + x[HALF - 1] - x[HALF])


def writes_an_operand(builder: KernelBuilder, x: Buffer, y: Buffer, task: Expr) -> None:
    with builder.loop(HALF) as i:
        builder.store(x, task * HALF + i, -x[task * HALF + i])
        builder.store(y, task * HALF + i, x[task * HALF + i])


def adds_to_scratch(builder: KernelBuilder, x: Buffer, y: Buffer, task: Expr) -> None:
    """Sums begin with whatever the workspace holds."""
    scratch = builder.workspace(LENGTH, "float32")
    with builder.loop(HALF) as i:
        builder.store(scratch, task * HALF + i, scratch[task * HALF + i] - x[task * HALF + i])
        builder.store(y, task * HALF + i, scratch[task * HALF + i])


def stores_no_zeros(builder: KernelBuilder, x: Buffer, y: Buffer, task: Expr) -> None:
    with builder.loop(HALF) as i, builder.when(x[task * HALF + i] > 0.0):
        builder.store(y, task * HALF + i, -x[task * HALF + i])


def tried(body: Body, monkeypatch: pytest.MonkeyPatch, inplace: tuple[tuple[int, int], ...] = ()) -> None:
    monkeypatch.setattr(harness, "build_kernel", lambda group, target: replace(kernel(body), inplace=inplace))
    check([operator("Neg", np.arange(LENGTH, dtype=np.float32))], TARGET)


@pytest.mark.parametrize("body", [negated, apart], ids=lambda body: body.__name__)
def test_sound_kernels_pass(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    tried(body, monkeypatch)


@pytest.mark.parametrize("body", [negated, before_it_reads], ids=lambda body: body.__name__)
def test_what_is_not_to_be_done_in_place_is_noticed(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements that are computed twice, or stored before all that read them have done so, where operands have no other memory."""
    tried(body, monkeypatch)
    with pytest.raises(AssertionError, match=r"differs .*, output 0 in place of x0|two writers"):
        tried(body, monkeypatch, ((0, 0),))


def test_what_may_be_done_in_place_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    tried(apart, monkeypatch, ((0, 0),))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (too_near, "4 bytes of buffer 1 have two writers"),
        (twice_in_place, "8 bytes of buffer 0 have two writers"),
        (reads_the_other, "differs"),
        (writes_an_operand, "writes to its operands"),
        (adds_to_scratch, "differs at another place"),
        (stores_no_zeros, "differs at another place"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_faults_are_noticed(body: Body, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=message):
        tried(body, monkeypatch)


def test_truth_is_one() -> None:
    """Every other byte that NumPy takes for True is not what the next kernel reads."""
    case = operator("Not", np.array([False, True]))
    for stored in (b"\1\0", b"\xff\0"):
        case.got = [np.frombuffer(stored, bool)]
        with nullcontext() if stored[0] == 1 else pytest.raises(AssertionError, match="Not23"):
            case.check()


def test_equal_kernels_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for each target again."""
    compiled: list[Target] = []

    def compile_module(module: object, target: Target) -> object:
        compiled.append(target)
        return native.compile_module(module, target)

    monkeypatch.setattr(harness, "compile_module", compile_module)
    forget_libraries()
    tried(negated, monkeypatch)
    tried(negated, monkeypatch)
    assert compiled == [TARGET]
    tried(apart, monkeypatch)
    assert compiled == [TARGET, TARGET]
    other = Target("cpu", "avx2", 3)
    monkeypatch.setattr(harness, "build_kernel", lambda group, target: kernel(negated))
    check([operator("Neg", np.arange(LENGTH, dtype=np.float32))] * 2, other)
    assert compiled == [TARGET, TARGET, other]
