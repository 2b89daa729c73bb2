"""Estimated cycles of products and convolutions by AMX, and of the same products on vectors (AVX-512).

A block of 32 x 32 sums is 2x2 tiles of products, then its stores and its epilogue; from `LEAST_STEPS` on, the vectors of the
block before are stored beside the products (`_Blocks._block_cycles` is the place that says so). Operands are packed before. Tiles
that come from L2 are seen in part beside the products, those from L1 not, as `prefuse doctor --fit` measures; where operands have
several terms, tiles are prefetched into L1. An operand that L1 cannot keep is streamed past it, so that the other one stays.
Figures were measured on cores of a Granite Rapids and of an Emerald Rapids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod

from ...runtime.hardware.machine import Machine
from ...runtime.symbolic.sizes import estimating, greatest_of
from .convolution import Convolution

LEAST_STEPS = 4  # of a block's loop, of one term each, between which an epilogue pays (measured: 2 steps 1.05, 4 steps 0.89)
OVERLAP = 0.65  # the part of a product by tiles behind which weights arrive that are prefetched a panel ahead: 0.6 to 0.74
STREAMED_SHARE = 0.5  # of L1: an operand of more, which the inner loop walks, is not kept there
_UNPREFETCHED = 0.6  # of the rate at which memory is read in order: that of weights that are not prefetched a panel ahead
_PACKED_TERMS = 2.6  # bfloat16 terms that a core packs in a cycle, from and to L1 or L2; bytes twice as many
_COPIED_VECTORS = 0.5  # in a cycle, of numbers of an image that are narrow before: 16 of bfloat16, 64 bytes
_BLOCK_LINES = 32  # rows of A and columns of B of a step of the micro-kernel (2x2 tiles)
_WORDS = 16  # of a row of a tile; a word has two values of k, or four where they are bytes
_MOST_LINE = 8192  # elements of an image row on the stack
_TILE_LINES = 16
_TILE_BYTES = 1024
_SUMS_BYTES = 4096  # of a block
_TERM_PRODUCTS = {1: (1, 1, 1), 2: (3, 2, 2), 3: (6, 3, 4)}  # by terms: their products, loads of a term of A and of B for them
# Of blocks of three terms, over their products and stores, not the operators of an epilogue: packing and prefetches share ports
# with loads of tiles, and a virtual machine's unit is busy with others' products at times (docs/kernels/amx.md).
_SEVERAL_TERMS = 1.6
# Cycles of a line of sums that is stored from a tile, by how much is kept of L1 between a block and the next: what leaves the
# sums there, or not; or so much, with sums of several blocks, that each line comes back from L2 one after the other.
_LINE_CYCLES = (2.2, 4.5, 18.0)
_LEAVING = 0.75  # times L1: what is read between two blocks and leaves the sums there
_EVICTING = 1.8  # times L1: what leaves nothing of the sums of several blocks
_APART_CYCLES = 4.0  # of a tile from L2 whose rows are no neighbours, so that its lines are not fetched ahead: 3 to 8
_VECTOR_CYCLES = 1.0  # of 16 sums: loaded, and stored as a result, beside the operators of the epilogue
_SEEN = 0.25  # of the vectors of an epilogue between products
_HIDDEN_CYCLES = 5.0  # of a vector, at most: of longer epilogues (GELU) the reorder buffer has no room for more beside tiles

_KEPT_WEIGHTS, _KEPT_IMAGE = 0.8, 0.75  # of L2, that stay there from one trip to the next
# Of the cycles in which L3 gives as many bytes in order (BlockWalk).
_WEIGHTS_WAIT, _IMAGE_WAIT, _BESIDE_WAIT, _FAR_BESIDE_WAIT = 1.2, 3.6, 0.9, 1.8


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of `rows` x `columns` sums over `depth` numbers, one column of blocks after the other.

    `a_bytes` of A are read for each column of blocks: tiles of images overlap, so that they may be fewer than rows x depth. The
    sums of `parts` neighbouring blocks, with the same rows of A, have memory of their own. With `is_a_apart` the
    rows of a tile of A lie apart, as they do in place. With `is_pipelined` a block is stored between the products of the next.
    The share `a_fresh` of A's tiles is of lines that the steps before have not read: taps of a window are a position apart.
    `beside` are cycles of the epilogue's operators, for a vector of sums. With `streams` an A that L1 does not keep is streamed.
    """

    rows: int
    columns: int
    depth: int
    terms: int
    k_pack: int
    a_bytes: float
    parts: int = 1
    is_a_apart: bool = False
    is_pipelined: bool = False
    a_fresh: float = 1.0
    beside: float = 0.0
    streams: bool = True

    @property
    def steps(self) -> int:
        """Of 16 words along k."""
        return ceil(self.depth / (_WORDS * self.k_pack))

    def cycles(self, machine: Machine) -> float:
        """Of all blocks, with the plain stores of their results."""
        a_tiles, b_tiles = ceil(self.rows / _TILE_LINES), min(ceil(self.columns / _TILE_LINES), 2)
        column = a_tiles // 2 * self._block_cycles(2, b_tiles, machine) + a_tiles % 2 * self._block_cycles(1, b_tiles, machine)
        return ceil(self.columns / _BLOCK_LINES) * column

    def _block_cycles(self, a_tiles: int, b_tiles: int, machine: Machine) -> float:
        lines = a_tiles * b_tiles * _TILE_LINES
        products = self.steps * self._step_cycles(a_tiles, b_tiles, machine)
        stored, beside = lines * _VECTOR_CYCLES, lines * self.beside
        if self.is_pipelined and self.steps * _TERM_PRODUCTS[self.terms][0] >= LEAST_STEPS:
            hidden = (1 - _SEEN) * min(stored + beside, products, lines * _HIDDEN_CYCLES)
            stored, beside = max(stored - hidden, 0.0), beside - max(hidden - stored, 0.0)
        whole = products + lines * self._line_cycles(a_tiles, b_tiles, machine) + stored
        return whole * (_SEVERAL_TERMS if self.terms == len(_TERM_PRODUCTS) else 1.0) + beside

    def _step_cycles(self, a_tiles: int, b_tiles: int, machine: Machine) -> float:
        """Of the products of 16 words of k, with what is seen of the loads beside them; or of the loads, if they are more."""
        products, *loads = _TERM_PRODUCTS[self.terms]
        dots, of_a, of_b = a_tiles * b_tiles * products, a_tiles * loads[0], b_tiles * loads[1]
        room = machine.l1.size_bytes - _SUMS_BYTES - b_tiles * self._tile_bytes
        has_room = room >= (0 if self._is_streamed(machine) else a_tiles * self._tile_bytes)
        is_b_near = has_room and self.rows > a_tiles * _TILE_LINES  # the next block reads it again
        is_a_near = self.a_bytes <= room  # the next column of blocks does
        fresh = 0.0 if is_a_near else self.a_fresh * of_a
        near = of_a - fresh + of_b * is_b_near
        far = of_a + of_b - near
        l1, l2 = (_TILE_BYTES / level.bytes_per_cycle for level in (machine.l1, machine.l2))
        dot = machine.tile_dot_cycles
        seen = near * (machine.tile_l1_cycles - dot) + far * (machine.tile_l2_cycles - dot)
        seen += _APART_CYCLES * fresh * self.is_a_apart
        return max(dots * dot + (seen if self.terms == 1 else 0.0), near * l1 + far * l2)

    def _line_cycles(self, a_tiles: int, b_tiles: int, machine: Machine) -> float:
        """Lines that come back from L2 wait behind the tiles that do."""
        kept = 0 if self._is_streamed(machine) else a_tiles
        read = (kept + self.parts * b_tiles) * self._tile_bytes / machine.l1.size_bytes
        least, some, evicted = _LINE_CYCLES
        is_evicted = self.parts > 1 and read > _EVICTING
        return least if read <= _LEAVING else max(evicted * self.a_fresh, some) if is_evicted else some

    def _is_streamed(self, machine: Machine) -> bool:
        """Whether tiles of A leave L1 to those of B."""
        is_read_once = self.streams and self.terms == 1 and self.a_fresh == 1.0
        return is_read_once and self.a_bytes > STREAMED_SHARE * machine.l1.size_bytes

    @property
    def _tile_bytes(self) -> int:
        """Of all steps of 16 rows or columns."""
        return self.steps * self.terms * _TILE_BYTES


@estimating
def tile_product_cycles(
    m: int,
    n: int,
    k: int,
    terms: int,
    machine: Machine,
    *,
    packs_a: bool,
    packs_b: bool,
    k_pack: int = 2,
    b_passes: int = 1,
    is_a_apart: bool = False,
    beside: float = 0.0,
) -> float:
    """Cycles of m x k by k x n by AMX, of operands as sums of `terms` bfloat16 terms, or of bytes (`k_pack` 4); with `packs_a`
    (`packs_b`) the kernel packs A (B). All of B is read `b_passes` times, each time for other rows.
    `is_a_apart`: rows of A are read in place. `beside`: cycles of the epilogue's operators for all results."""
    rows, columns = (_whole(extent, _BLOCK_LINES) for extent in (m, n))
    packed = (rows * packs_a + columns * packs_b) * _whole(k, _WORDS * k_pack) * terms
    b_bytes = columns * _whole(k, _WORDS * k_pack) * terms * 4 // k_pack
    again = (b_passes - 1) * machine.read_cycles(b_bytes) if b_bytes > machine.l2.size_bytes else 0.0
    of_vector = beside * _WORDS / max(m * n, 1)
    blocks = replace(_product_blocks(m, n, k, terms, k_pack), is_a_apart=is_a_apart, is_pipelined=True, beside=of_vector)
    return blocks.cycles(machine) + _packing_cycles(packed, k_pack, machine) + again


def _product_blocks(rows: int, columns: int, depth: int, terms: int, k_pack: int) -> _Blocks:
    a_bytes = _whole(rows, _TILE_LINES) * _whole(depth, _WORDS * k_pack) * terms * 4 // k_pack
    return _Blocks(rows, columns, depth, terms, k_pack, a_bytes)


def memory_share(terms: int, *, is_prefetched: bool) -> float:
    """`Estimate.memory_share` of products by weights that lie as so many terms of bfloat16; three of a float32 are 6 bytes."""
    return (1.0 if is_prefetched else _UNPREFETCHED) * min(2 / terms, 1.0)


def _packing_cycles(numbers: float, k_pack: int, machine: Machine, held_bytes: float | None = None, rate: float = 0.0) -> float:
    """Of so many terms of bfloat16, or bytes, that become tiles: they go to the cache that holds them all, or `held_bytes` at a
    time, and come back. `rate`: how many in a cycle, if they are only copied."""
    return numbers / (rate or _PACKED_TERMS * k_pack / 2) + 2 * machine.read_cycles(numbers * 4 / k_pack, held_bytes)


def _whole(extent: int, step: int) -> int:
    """The extent, filled up to whole steps."""
    return ceil(extent / step) * step


def tile_step_cycles(
    rows: int, columns: int, depth: int, terms: int, machine: Machine, k_pack: int = 2, *, gates: int = 1
) -> float:
    """Cycles of a recurrence's product of one step by AMX: weights come from L2 or L3, and A is packed at each step. The sums of
    all gates of a unit are kept until it is computed."""
    blocks = replace(_product_blocks(rows, columns, depth, terms, k_pack), parts=gates, streams=False)
    return blocks.cycles(machine) + _packing_cycles(rows * depth * terms, k_pack, machine)


def vector_step_cycles(rows: int, columns: int, depth: int, machine: Machine) -> float:
    """Cycles of the same by float32 FMAs, also where weights are bfloat16."""
    return rows * ceil(columns / machine.lanes) * max(depth / machine.multiply_adds, machine.sum_latency) + rows * columns / 4


def joined_columns(one: Convolution, k_pack: int = 2) -> int:
    """Kernel columns whose channels are packed side by side along k, where those of one column fill few of a tile's 16 words."""
    columns, inputs, of_step = one.kernel[1], one.inputs, _WORDS * k_pack
    is_plain = one.groups == one.dilations[1] == one.phases == 1 and greatest_of(one.height) > 1
    are_few = inputs < of_step and ceil(columns * inputs / of_step) < columns
    line = ((greatest_of(one.columns) - 1) * one.strides[1] + columns) * inputs
    return columns if is_plain and are_few and line <= _MOST_LINE else 1


@estimating
def tile_convolution_cycles(
    one: Convolution,
    terms: int,
    machine: Machine,
    *,
    copies: float = 1.0,
    k_pack: int = 2,
    band_bytes: int | None = None,
    is_narrow: bool = False,
    beside: float = 0.0,
) -> float:
    """Cycles of an NHWC convolution by AMX, of bfloat16 terms or bytes (`k_pack` 4). The kernel packs its input so many times:
    0 where tiles are read in place, more than once where it does so in bands of rows, of `band_bytes` each. An input that
    `is_narrow` has the numbers of tiles, which are copied as they are. `beside`: cycles of the epilogue for all results."""
    joined = joined_columns(one, k_pack)
    pitch = one.columns if joined > 1 else one.columns + (one.kernel[1] - 1) * one.dilations[1] // one.strides[1]
    channels = _whole(one.inputs * joined, _WORDS * k_pack)
    positions, depth = (one.rows // one.planes - 1) * pitch + one.columns, prod(one.kernel) // joined * channels
    outputs, matrices, planes = one.outputs // one.phases, one.groups * one.phases, one.images * one.planes
    a_bytes = positions * channels * terms * 4 / k_pack  # of an image that its taps read again and again
    fresh = _fresh_taps(one, 1 if joined > 1 else one.kernel[1], channels * terms * 4 // k_pack, machine)
    of_vector = beside * _WORDS / max(planes * matrices * one.rows // one.planes * one.columns * outputs, 1)
    one_matrix = replace(
        _Blocks(positions, outputs, depth, terms, k_pack, a_bytes, is_a_apart=True, is_pipelined=True),
        a_fresh=fresh,
        beside=of_vector,
    )
    blocks = planes * matrices * one_matrix.cycles(machine)
    width = one.columns if joined > 1 else one.width
    read = prod(min(taps, step) / step for taps, step in zip(one.kernel, one.strides, strict=True))  # of a stride's phases
    copied = one.images * one.groups * one.height * width * channels * terms * (1.0 if joined > 1 else read)
    rate = _COPIED_VECTORS * (_WORDS if k_pack < 4 else k_pack * _WORDS) if is_narrow and joined == 1 else 0.0
    return blocks + _packing_cycles(copied, k_pack, machine, band_bytes, rate) * copies


@dataclass(frozen=True, slots=True)
class BlockWalk:
    """Lines that blocks of `rows` x `columns` wait for beside their products, on `threads` cores, by which loop is outermost and
    cut between them: bytes of `weights`, of the `image` and of what is read and stored `beside` the sums, of all blocks.

    Blocks of positions read their weights with nothing ahead of them, once where L2 keeps them. A panel of weights is prefetched
    while the one before it is multiplied, but its blocks read rows of the image that other cores wrote, and of what lies beside
    the sums they touch pieces, a row apart, of which no line foretells the next. Measured on an Emerald Rapids, in ResNet-50 and
    InceptionNeXt: a MiB of weights takes 50 us, of an image 150, of results and residuals 35 where they stay in L2, else 75.
    """

    rows: int
    columns: int
    weights: float
    image: float
    beside: float
    threads: int

    @estimating
    def goes_by_panel(self, machine: Machine) -> bool:
        """Whether weights are the outer loop."""
        return self._by_panel(machine) < self._by_rows(machine)

    @estimating
    def cycles(self, machine: Machine) -> float:
        """Of all cores together, by the better order."""
        return self.threads * min(self._by_panel(machine), self._by_rows(machine))

    def _by_rows(self, machine: Machine) -> float:
        trips = 1.0 if self.weights <= _KEPT_WEIGHTS * machine.l2.size_bytes else self.rows / self.threads
        return (_WEIGHTS_WAIT + max(trips - 1, 0.0)) * self.weights / machine.l3.bytes_per_cycle

    def _by_panel(self, machine: Machine) -> float:
        trips = 1.0 if self.image <= _KEPT_IMAGE * machine.l2.size_bytes else self.columns / self.threads
        others, own = 1 - 1 / self.threads, self.beside / self.threads
        image = (_IMAGE_WAIT * others + max(trips - 1, 0.0)) * self.image
        beside = (_BESIDE_WAIT if own <= machine.l2.size_bytes else _FAR_BESIDE_WAIT) * own
        return (image + beside) / machine.l3.bytes_per_cycle


def _fresh_taps(one: Convolution, taps: int, position_bytes: int, machine: Machine) -> float:
    """The share of the taps of a window's row whose tiles are not those of the tap before, moved by a position, of which L1 still
    has all lines but one: one tap in each phase of the stride, where a row's tiles of image and weights have room there."""
    of_a, of_b = (_BLOCK_LINES + taps) * position_bytes, _BLOCK_LINES * position_bytes
    return min(one.strides[1], taps) / taps if of_a + of_b <= machine.l1.size_bytes and one.dilations[1] == 1 else 1.0


def vector_product_cycles(m: int, n: int, k: int, machine: Machine, *, is_narrow: bool) -> float:
    """Cycles of m x k by k x n by float32 FMAs or, if `is_narrow` (bfloat16 operands), by dot products of bfloat16 pairs, which
    CPUs with AMX issue at half the rate of FMAs (LLVM's model of Sapphire Rapids)."""
    step, weight_bytes = (k / 2 / (machine.dots or machine.multiply_adds), 2) if is_narrow else (k / machine.multiply_adds, 4)
    computed = m * ceil(n / machine.lanes) * max(step, machine.sum_latency)
    return max(computed, n * k * weight_bytes / machine.memory_bytes) + m * n / 4
