"""What tiles that share a panel of weights prefetch of the next one."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from prefuse.kernels.codegen.builder import Expr, KernelBuilder
from prefuse.kernels.microkernels.packing import Panel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.hardware.machine import LINE_BYTES
from prefuse.runtime.target import Target

from .. import harness

TARGET = Target("cpu", "avx2")
ROWS, COLUMNS, NUMBERS_OF_LINE = 40, 16, LINE_BYTES // 4
SIZE = ROWS * COLUMNS


def prefetched(parts: int, columns: int = COLUMNS) -> np.ndarray:
    """How often each element of eight panels has its line prefetched by all tiles that read the first one: a prefetch adds one
    to the element that it names."""
    builder = KernelBuilder(TARGET.machine, 1)
    counts = builder.parameter("counts", 8 * SIZE, "int32")
    panel = Panel(counts, 0, columns)

    def add(_: KernelBuilder, element: Expr, *, is_near: bool = True) -> None:
        assert not is_near
        builder.store(counts, element.indices[0], element + 1)

    with mock.patch.object(KernelBuilder, "prefetch", add), builder.loop(parts, name="tile") as part:
        prefetch = panel.prefetch_next(builder, ROWS, part, parts)
        with builder.loop(ROWS, name="k") as k:
            prefetch(k)
    (run,), _ = harness._load([BuiltKernel("made", builder.function(), (), 0)], TARGET)
    found = np.zeros(8 * SIZE, np.int32)
    run(found.ctypes.data)
    return found


@pytest.mark.parametrize("parts", [1, 3, 15, 16, 17, 39, 40, 41, 640, 6000])
def test_the_next_panel_alone_is_prefetched(parts: int) -> None:
    """Each of its lines, and where tiles are many nothing behind it: 9000 tiles had prefetched 40 MB there, 16 times a line."""
    lines = prefetched(parts).reshape(-1, NUMBERS_OF_LINE).sum(axis=1)
    own, following = lines[: SIZE // NUMBERS_OF_LINE], lines[SIZE // NUMBERS_OF_LINE :]
    of_next, beyond = following[: SIZE // NUMBERS_OF_LINE], following[SIZE // NUMBERS_OF_LINE :]
    assert not own.any()
    assert of_next.all()
    if parts >= COLUMNS:
        assert not beyond.any()
    if parts > COLUMNS:
        assert (of_next == 1).all()
    assert not beyond[SIZE // NUMBERS_OF_LINE :].any()  # shares of fewer tiles are whole numbers a row: of two panels at most
