"""Where a thread works that computes attention: its scratch, its head, its block of queries and its run of keys."""

from __future__ import annotations

from dataclasses import dataclass

from ..codegen.builder import Expr, Index
from ..microkernels.packed_gemm import Panels, Scratch
from ..microkernels.packed_gemm_amx import TiledPanels, TileScratch
from .online_softmax import Rows


@dataclass(frozen=True)
class Places:
    """Of one thread: for operands, the state of rows, and what products on the tile unit need."""

    queries: Scratch
    keys: Scratch
    values: Scratch
    rows: Rows
    words: Scratch  # of the first operand of a product in pairs
    tiles: TileScratch | None


@dataclass(frozen=True)
class Head(Places):
    """Where one thread works: the place among the batch dimensions, and its scratch."""

    batch: Index


@dataclass(frozen=True)
class Keys:
    """`count` keys and their values from `first` on, which are in panels at once."""

    first: Expr
    count: int
    keys: Panels | TiledPanels
    values: Panels | TiledPanels


@dataclass(frozen=True)
class QueryBlock:
    """A block of queries: `count` of them from `first` on, the first of which is row `row` of the thread's."""

    first: Expr
    count: Expr
    row: Expr
