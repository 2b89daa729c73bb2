"""The scratch, head, block of queries and block of keys of a thread that computes attention."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ..codegen.builder import Expr, Index
from ..microkernels.packed_gemm import PackedPanels, Scratch
from ..microkernels.packed_gemm_amx import AmxPanels, TileScratch
from .online_softmax import Rows

SPAN_NUMBERS = 3  # where a block's visible keys begin, where they end, and whether each query sees any key


@dataclass(frozen=True)
class Places:
    """Scratch of one thread: packed operands, rows of scores, and what AMX products need."""

    queries: Scratch
    keys: Scratch
    values: Scratch
    rows: Rows
    words: Scratch  # for A of a product as bfloat16 pairs
    tiles: TileScratch | None
    spans: Scratch  # int32, `SPAN_NUMBERS` a row where a mask may hide keys: which keys a block of queries sees


@dataclass(frozen=True)
class Head(Places):
    """A head: its index in the batch dimensions, and the scratch of the thread that computes it."""

    batch: Index


@dataclass(frozen=True)
class Keys:
    """A block of `count` keys and their values from `first` on."""

    first: Expr
    count: int


@dataclass(frozen=True)
class PackedKeys(Keys):
    """The same, packed into panels."""

    keys: PackedPanels | AmxPanels
    values: PackedPanels | AmxPanels


@dataclass(frozen=True)
class QueryBlock:
    """A block of `count` queries from `first` on, rows from `row` on of the thread's state."""

    first: Expr
    count: Expr
    row: Expr


def head_chunks(heads: int, blocks: int, threads: int, least: int) -> int:
    """Runs into which a head's blocks are cut: the fewest that balance the threads within a tenth, if any do."""
    for chunks in range(min(least, blocks), blocks + 1):
        tasks = heads * chunks
        if ceil(tasks / threads) * threads <= 1.1 * tasks:
            return chunks
    return blocks
