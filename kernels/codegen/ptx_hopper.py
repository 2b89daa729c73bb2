"""NVIDIA's instructions from sm_90 on, as calls that `GpuBuilder.do` makes statements of: mbarriers, bulk copies, warpgroups.

An mbarrier is 8 bytes of shared memory that count arrivals and bytes of copies; a phase is over when none is missing. Waiting
for the parity of a phase ends once that phase has; before the first phase is over the parity 1 has passed. Addresses are those
of the shared window (ptx.shared_address). PTX ISA: mbarrier, cp.async.bulk, wgmma. On sm_90 is all but warpgroups' products and
numbers of registers, which sm_90a has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tvm import tirx
from tvm.script import tirx as script

from .builder import Buffer, Expr
from .gpu_builder import GpuBuilder
from .ptx import Half

_PTX = script.ptx
MBARRIER_BYTES = 8
SWIZZLE_BYTES = 128  # of a row of shared memory whose 16-byte chunks are exchanged
SWIZZLE_ROWS = 8  # after which the exchanges repeat
STEP_DEPTH = 16  # of k that an instruction multiplies
WARPGROUP = 128  # threads, the first of which is a multiple of these
_SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}  # as descriptors number them


def u32(value: Expr | int) -> Expr:
    return tirx.const(value, "uint32") if isinstance(value, int) else tirx.Cast("uint32", value)


def init_mbarrier(mbarrier: Expr, arrivals: int) -> Expr:
    """By one thread; others come behind a barrier of the block, copies behind `fence_mbarriers`."""
    return _PTX["mbarrier.init.shared.b64"](mbarrier, u32(arrivals))


def fence_mbarriers() -> Expr:
    """Copies see the mbarriers that the thread has initialised."""
    return _PTX["fence.mbarrier_init.release.cluster"]()


def fence_async() -> Expr:
    """Copies and warpgroups see what the thread has stored to shared memory."""
    return _PTX["fence.proxy.async.shared::cta"]()


def arrive(mbarrier: Expr) -> Expr:
    return _PTX["mbarrier.arrive.shared::cta.b64"](mbarrier)


def arrive_and_expect(mbarrier: Expr, size_bytes: int) -> Expr:
    """Arrive, and let the phase last until copies have brought so many bytes, too."""
    return _PTX["mbarrier.arrive.expect_tx.shared::cta.b64"](mbarrier, u32(size_bytes))


def wait(builder: GpuBuilder, done: Buffer, mbarrier: Expr, parity: Expr) -> None:
    """Wait until the phase of a parity is over; `done` is a register (uint32)."""
    zero = tirx.const(0, "int32")
    builder.store(done, zero, u32(0))
    with builder.while_true(tirx.EQ(done[zero], u32(0))):
        builder.do(_PTX["mbarrier.try_wait.parity.shared::cta.b64"](done[zero], mbarrier, parity))


def copy_tensor(to: Expr, tensor_map: Expr, place: Sequence[Expr], mbarrier: Expr) -> Expr:
    """A box of a tensor, the element at `place` (innermost dimension first) as its first, to shared memory."""
    copy = _PTX[f"cp.async.bulk.tensor.{len(place)}d.shared::cluster.global.mbarrier::complete_tx::bytes"]
    return copy(to, tensor_map, *place, mbarrier)


def copy_bulk(to: Expr, source: Expr, size_bytes: int, mbarrier: Expr) -> Expr:
    """Contiguous bytes from the element `source` on; all are multiples of 16."""
    copy = _PTX["cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"]
    return copy(to, tirx.address_of(source), u32(size_bytes), mbarrier)


def meet(number: int, threads: int) -> Expr:
    """Barrier `number`, from 1 to 15, of so many threads of the block: as __syncthreads is of all."""
    return _PTX["bar.sync"](u32(number), u32(threads))


def set_registers(count: int, change: Literal["inc", "dec"]) -> Expr:
    """How many registers the threads of the warp have from now on: a multiple of 8."""
    return _PTX[f"setmaxnreg.{change}.sync.aligned.u32"](count)


def descriptor(address: Expr, *, leading: int, stride: int, swizzle_bytes: int = SWIZZLE_BYTES) -> Expr:
    """Of an operand in shared memory, 64 bits. Distances in bytes; with a swizzle:

    rows along k: of 16 bytes each `swizzle_bytes`, `stride` from 8 lines to the next (`leading` is not used);
    rows along lines: `leading` from the lines of a row to the next, `stride` from 8 of k to the next.
    """
    pattern = _SWIZZLES[swizzle_bytes] << 62 | (stride >> 4) << 32 | (leading >> 4) << 16
    low = (address & u32(0x3FFFF)) >> u32(4)
    return tirx.const(pattern, "uint64") | tirx.Cast("uint64", low)


def fence_warpgroup() -> Expr:
    """Before the first product, and behind accesses of registers of sums or of A."""
    return _PTX["wgmma.fence.sync.aligned"]()


def commit_products() -> Expr:
    """The warpgroup's products since the last call become a group."""
    return _PTX["wgmma.commit_group.sync.aligned"]()


def wait_for_products(left: int) -> Expr:
    """Wait for all groups of products but the last `left`: their sums may be read, their operands overwritten."""
    return _PTX["wgmma.wait_group.sync.aligned"](left)


def multiply(sums: Sequence[Expr], a: Expr, b: Expr, kind: Half, keeps: Expr, *, a_along_k: bool, b_along_k: bool) -> Expr:
    """wgmma m64nNk16 by the four warps of a warpgroup: 64 x N sums (+)= 64 x 16 by 16 x N, by descriptors; N = 2 len(sums).

    Warp w has rows 16 w to 16 w + 15; sum i of lane l is of row l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (l % 4) + i % 2.
    Without `keeps` what the sums were does not count. They are known behind `wait_for_products`.
    """
    assert len(sums) % 4 == 0
    assert len(sums) <= 128
    product = _PTX[f"wgmma.mma_async.sync.aligned.m64n{2 * len(sums)}k16.f32.{kind}.{kind}"]
    return product(*sums, a, b, keeps, 1, 1, int(not a_along_k), int(not b_along_k))
