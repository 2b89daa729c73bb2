"""A step that reads weights beside programs that do nothing but read as many bytes, in turns, on the threads of the step.

How fast a memory is read depends on how: one stream of addresses a thread, or several beside each other, or rows of a matrix with
what comes next prefetched, as products of one row do. The floor is the fastest of these in a run. Where the step is faster than
that, none of them is a floor, and the result says so.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import onnx.parser
import prefuse
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import Launch, Plan, Role

from .turns import PAUSE_SECONDS, Block, Call, Rounds, Spread, block_of, compared, in_milliseconds, take_turns

_STREAMS = (1, 2, 4)  # a thread
_ROWS = 1024  # of the matrix that a product of one row reads
_PRODUCTS = ("matmul", "product_rows", "dequantized_rows", "fixed_point_tiles")  # in names of templates
_READS = 3  # of a reader in a turn; another one, before them, finds its pages


@dataclass(frozen=True, slots=True)
class Floor:
    """A step beside reading `size_bytes`, medians; `share` is the floor's time over the step's, round by round: 1 is as fast as
    reading."""

    size_bytes: int
    reader: str  # the fastest
    step_ms: float
    floor_ms: float
    share: Spread
    rounds_ms: Mapping[str, list[list[float]]]  # of the step, of each reader, and of whatever had turns beside them

    @property
    def gigabytes_per_second(self) -> float:
        return self.size_bytes / self.floor_ms / 1e6

    @property
    def fault(self) -> str:
        """Why the floor is none, or nothing: in three of four rounds the step took less time."""
        if self.share.low <= 1:
            return ""
        return (
            f"the floor is slower than the step: reading {self.size_bytes} bytes by {self.reader} takes {self.share} of its time"
        )


def weights_read(plan: Plan) -> int:
    """Bytes of constants that the products of a call read, each byte once: weights with their scales, and vectors."""
    constants = {buffer.name: buffer for buffer in plan.buffers if buffer.role is Role.CONSTANT}
    templates = {kernel.symbol: kernel.template for kernel in plan.kernels}
    pieces: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for step in plan.steps:
        if isinstance(step, Launch) and is_product(templates[step.kernel]):
            for region in step.reads:
                if (buffer := constants.get(region.buffer)) is not None:
                    place, base = (buffer.name, 0) if buffer.offset is None else (buffer.space, buffer.offset)
                    row_bytes = region.size_bytes // region.rows
                    starts = (base + region.offset + row * region.pitch for row in range(region.rows))
                    pieces[place] += [(start, start + row_bytes) for start in starts]
    return sum(map(_covered, pieces.values()))


def is_product(template: str) -> bool:
    """Whether kernels of a template multiply matrices."""
    return any(word in template for word in _PRODUCTS)


def _covered(pieces: Sequence[tuple[int, int]]) -> int:
    """Bytes that are in any of these ranges."""
    total, reached = 0, 0
    for begin, end in sorted(pieces):
        total += max(end - max(begin, reached), 0)
        reached = max(reached, end)
    return total


def readers(size_bytes: int, threads: int) -> dict[str, Call]:
    """Programs that read so many bytes of private memory in large pages, by how they do."""
    found: dict[str, Call] = {}
    memory = _in_large_pages(max(size_bytes // 4, _ROWS))
    for streams in _STREAMS:
        columns = max(size_bytes // (4 * threads * streams), 1)
        names = [f"x{number}" for number in range(streams)]
        given = ", ".join(f"float[{threads},{columns}] {name}" for name in names)
        made = names[0] if streams == 1 else "m"
        text = f"""<ir_version: 10, opset_import: ["": 21]>
            read ({given}) => (float[{threads}] y) {{
                {"" if streams == 1 else f"m = Max({', '.join(names)})"}
                axis = Constant<value_ints = [1]>()
                y = ReduceMax<keepdims = 0>({made}, axis)
            }}"""
        parts = memory[: streams * threads * columns].reshape(streams, threads, columns)
        found[f"{streams} stream{'s' * (streams > 1)} a thread"] = partial(_compiled(text, threads), *parts)
    columns = max(size_bytes // (4 * _ROWS), 1)
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        read (float[1,{_ROWS}] x, float[{_ROWS},{columns}] w) => (float[1,{columns}] y) {{ y = MatMul(x, w) }}"""
    matrix = memory[: _ROWS * columns].reshape(_ROWS, columns)
    found["a product of one row"] = partial(_compiled(text, threads), np.ones((1, _ROWS), np.float32), matrix)
    return found


def _compiled(text: str, threads: int) -> CompiledModel:
    net = prefuse.compile(onnx.parser.parse_model(text), threads=threads, cache=False)
    assert isinstance(net, CompiledModel)
    return net


def _in_large_pages(count: int) -> np.ndarray:
    """So many ones, in private memory of its own: shared memory gets no large pages."""
    memory = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.float32)
    array[...] = 1
    return array


def beside_reading(step: Block, size_bytes: int, threads: int, rounds: int, others: Mapping[str, Block] | None = None) -> Floor:
    """Rounds of a step, of each reader and of `others`; the first round does not count."""
    given = readers(size_bytes, threads)
    blocks: dict[str, Block] = {"step": step, **{name: block_of(call, _READS) for name, call in given.items()}, **(others or {})}
    return floor_of(take_turns(blocks, rounds, PAUSE_SECONDS, warm_up=1), size_bytes, tuple(given))


def floor_of(times: Rounds, size_bytes: int, names: Sequence[str]) -> Floor:
    """What these rounds say, of which `names` are the readers."""
    reader = min(names, key=lambda name: _median_ms(times[name]))
    share = compared(times[reader], times["step"])
    raw = {name: in_milliseconds(found) for name, found in times.items()}
    return Floor(size_bytes, reader, _median_ms(times["step"]), _median_ms(times[reader]), share, raw)


def _median_ms(rounds: Sequence[Sequence[float]]) -> float:
    """The median of the medians of rounds."""
    return 1e3 * median(median(times) for times in rounds)


def shown(floor: Floor) -> str:
    """For people."""
    return (
        f"{floor.size_bytes / 1e6:.0f} MB of weights {floor.floor_ms:.2f} ms at {floor.gigabytes_per_second:.1f} GB/s by "
        f"{floor.reader}: {floor.share} of the floor"
    )


Rewind = Callable[[], object]


def text_block(rewind: Rewind, step: Call, steps: int) -> Block:
    """A turn of a text: it goes back before the turn, outside of what is timed, and the first step does not count."""

    def block() -> list[float]:
        rewind()
        return list(block_of(step, steps - 1)())

    return block
