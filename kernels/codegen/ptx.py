"""NVIDIA's instructions of warps and of asynchronous copies, as calls that `GpuBuilder.do` makes statements of.

They are those of TVM's PTX dialect; addresses of shared memory are 32-bit integers of the shared window (`shared_address`).
A matrix fragment is 8 x 8 numbers of 16 bits, a 32-bit register of each lane: lane l has elements 2 (l % 4) and the next of row
l / 4. All is there from sm_80 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from tvm import tirx
from tvm.script import tirx as script

from .builder import Buffer, Expr

Half: TypeAlias = Literal["bf16", "f16"]  # the 16-bit floats that the matrix unit multiplies
Byte: TypeAlias = Literal["u8", "s8"]
COPY_BYTES = 16  # of an asynchronous copy that goes around L1
_PTX = script.ptx


def shared_address(buffer: Buffer) -> Expr:
    """Where a shared array begins."""
    return script.cuda.cvta_generic_to_shared(tirx.address_of(buffer[0]))


def copy_async(to: Expr, source: Expr, valid: Expr | None = None) -> Expr:
    """cp.async: 16 bytes of global memory (the element `source`) to shared memory; only the first `valid` bytes are read, zeros
    take the place of the others."""
    address = tirx.address_of(source)
    copy = _PTX["cp.async.cg.shared.global.L2::128B"]
    return copy(to, address, COPY_BYTES) if valid is None else copy(to, address, COPY_BYTES, valid)


def commit_copies() -> Expr:
    """The thread's copies since the last call become a group."""
    return _PTX["cp.async.commit_group"]()


def wait_for_copies(left: int) -> Expr:
    """Wait for all groups of the thread's copies but the last `left`. Others see them behind a barrier."""
    return _PTX["cp.async.wait_group"](left)


def load_fragments(registers: Sequence[Expr], address: Expr, *, transposed: bool = False) -> Expr:
    """ldmatrix: four fragments; lane 8 f + r gives the address of row r of fragment f, which is 16 bytes. Transposed, a lane gets
    neighbours of a column."""
    assert len(registers) == 4
    return _PTX[f"ldmatrix.sync.aligned.m8n8.x4{'.trans' * transposed}.shared.b16"](*registers, address)


def multiply(sums: Sequence[Expr], a: Sequence[Expr], b: Sequence[Expr], kind: Half) -> Expr:
    """mma.sync m16n8k16: 16 x 8 sums += 16 x 16 by 16 x 8.

    `a` are the fragments of rows 0-7 and 8-15 for k 0-7, then for k 8-15; `b` those of k 0-7 and 8-15, columns along lanes / 4.
    Of `sums`, float32, lane l has columns 2 (l % 4) and the next of row l / 4, then of row l / 4 + 8.
    """
    assert (len(sums), len(a), len(b)) == (4, 4, 2)
    return _PTX[f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"](*sums, *a, *b, *sums)


def multiply_bytes(sums: Sequence[Expr], a: Sequence[Expr], b: Sequence[Expr], kind: Byte) -> Expr:
    """mma.sync m16n8k32: 16 x 8 sums, words that are int32, += 16 x 32 numbers of A, signed or not, by 32 x 8 signed ones.

    Fragments are 8 lines of 16 bytes, a word of each lane: those of 16-bit floats, with two numbers in the place of one.
    """
    assert (len(sums), len(a), len(b)) == (4, 4, 2)
    return _PTX[f"mma.sync.aligned.m16n8k32.row.col.s32.{kind}.s8.s32"](*sums, *a, *b, *sums)


def store_shared(address: Expr, words: Sequence[Expr]) -> Expr:
    """1, 2 or 4 words of 32 bits to shared memory, at a multiple of their size."""
    return _PTX[f"st.shared{f'.v{len(words)}' * (len(words) > 1)}.b32"](address, *words)


def rounded_pair(word: Expr, low: Expr, high: Expr, kind: Half) -> Expr:
    """Two float32 numbers rounded to the nearest of 16 bits, `low` in the lower half of `word`."""
    return _PTX[f"cvt.rn.{kind}x2.f32"](word, high, low)
