"""The text form of a Plan, one line a thing: written to program files, read by people, compared by tests.

`parse_plan(print_plan(plan)) == plan` for every plan. A name that is not plain ASCII stands in JSON quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar

import numpy as np

from .errors import ProgramFileError
from .gpu.tensor_maps import TensorMap
from .plan import (
    FORMAT_VERSION,
    PACKED_TYPES,
    Buffer,
    Copy,
    Extent,
    Grid,
    Host,
    Kernel,
    Launch,
    Plan,
    Port,
    Record,
    Region,
    Role,
    Sized,
    Space,
    State,
    Step,
    TensorType,
    Wait,
)
from .symbolic.size_text import evaluator
from .symbolic.sizes import Dim

_BARE = re.compile(r"[A-Za-z0-9_.$/][A-Za-z0-9_.$/-]*")
_TOKEN = re.compile(r'\s*(?:("(?:[^"\\]|\\.)*")|([A-Za-z0-9_.$/][A-Za-z0-9_.$/-]*)|(->|[()\[\],:=]))')
_LARGEST = 2**63 - 1  # sizes and offsets are passed to native code as int64

_T = TypeVar("_T")


def print_plan(plan: Plan) -> str:
    """The plan as text that `parse_plan` reads back to an equal plan."""
    return "\n".join(_lines(plan)) + "\n"


def parse_plan(text: str) -> Plan:
    """The plan that `print_plan` wrote.

    Raises:
        ProgramFileError: the text is no plan, naming the line, or a plan of another format version.
    """
    return _Parser().parse(text)


def _lines(plan: Plan) -> Iterator[str]:
    yield f"plan {plan.version} {_name(plan.target)}"
    yield from (f"dim {_name(dim.name)} from {dim.least} to {dim.greatest} by {dim.multiple}" for dim in plan.dims)
    for space in plan.spaces:
        capacity = "" if space.capacity_bytes is None else f" capacity {space.capacity_bytes}"
        yield f"space {_name(space.name)} size {space.size_bytes}{capacity}"
    for buffer in plan.buffers:
        place = "" if buffer.offset is None else f" at {buffer.offset}"
        renews = "" if buffer.renews is None else f" renews {_name(buffer.renews)}"
        yield f"buffer {_name(buffer.name)} {buffer.role} size {buffer.size_bytes} in {_name(buffer.space)}{place}{renews}"
    for keyword, ports in (("input", plan.inputs), ("output", plan.outputs)):
        for port in ports:
            yield f"{keyword} {_name(port.name)} {port.type} in {_name(port.buffer)}{_extents(port)}{_sizes(port)}"
    for state in plan.states:
        initial = "" if state.initial is None else f" initial {_name(state.initial)}"
        yield f"state {_name(state.name)} {state.type} in {_name(state.buffer)}{initial}"
    for kernel in plan.kernels:
        yield (
            f"kernel {_name(kernel.symbol)} template {_name(kernel.template)} arguments {kernel.arguments}"
            f" flops {kernel.flops} bytes {kernel.bytes_moved}{_multiplies(kernel)}{_grids(kernel)}"
        )
    yield from map(_step, plan.steps)


def _step(step: Step) -> str:
    match step:
        case Launch():
            scratch = f" scratch {_regions(step.scratch)}" if step.scratch else ""
            inplace = f" inplace ({', '.join(f'{write}={read}' for write, read in step.inplace)})" if step.inplace else ""
            label = f" label {_name(step.label)}" if step.label else ""
            text = f"launch {_name(step.kernel)} {_regions(step.reads)} -> {_regions(step.writes)}{scratch}{inplace}{label}"
        case Host():
            text = f"host {_name(step.function)} {_regions(step.reads)} -> {_regions(step.writes)}"
        case Copy():
            text = f"copy {_region(step.source)} -> {_region(step.destination)}"
        case Record():
            text = f"record {step.event}"
        case Wait():
            text = f"wait {step.event}"
    return text + (f" stream {step.stream}" if step.stream else "")


def _multiplies(kernel: Kernel) -> str:
    return "" if kernel.multiplies == "float32" else f" multiplies {_name(kernel.multiplies)}"


def _grids(kernel: Kernel) -> str:
    return f" grids ({', '.join(map(_grid, kernel.grids))})" if kernel.grids else ""


def _grid(grid: Grid) -> str:
    scalars = f" scalars ({', '.join(map(str, grid.scalars))})" if grid.scalars else ""
    shared = f" shared {grid.shared_bytes}" if grid.shared_bytes else ""
    maps = f" maps ({', '.join(map(_map, grid.maps))})" if grid.maps else ""
    together = " cooperative" if grid.is_cooperative else ""
    return f"{_name(grid.function)} blocks {grid.blocks} threads {grid.threads}{shared}{scalars}{maps}{together}"


def _map(one: TensorMap) -> str:
    extents, strides, box = (f"[{','.join(map(str, numbers))}]" for numbers in (one.extents, one.strides, one.box))
    return f"{one.argument} of {one.item_bytes} {extents} strides {strides} box {box} swizzle {one.swizzle_bytes}"


def _extents(port: Port) -> str:
    listed = ", ".join(f"{extent.axis}={_name(extent.buffer)}" for extent in port.extents)
    return f" extents ({listed})" if listed else ""


def _sizes(port: Port) -> str:
    listed = ", ".join(f"{sized.axis}={json.dumps(sized.text)}" for sized in port.sizes)
    return f" sizes ({listed})" if listed else ""


def _name(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name)


def _region(region: Region) -> str:
    """Bytes of the first row, and of more rows their number and pitch: "x[64:96]", "x[64:96 rows 10 pitch 128]"."""
    rows = f" rows {region.rows} pitch {region.pitch}" if region.rows > 1 else ""
    return f"{_name(region.buffer)}[{region.offset}:{region.offset + region.size_bytes // region.rows}{rows}]"


def _regions(regions: Iterable[Region]) -> str:
    return f"({', '.join(map(_region, regions))})"


class _SyntaxError(Exception):
    """What is wrong in one line; the parser adds the line's number."""


class _Line:
    """The tokens of one line, taken from the left. A token is its text and its kind: a quoted name, a bare word or a mark."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, Literal["quoted", "bare", "mark"]]] = []
        self._next = 0
        position, end = 0, len(text.rstrip())
        while position < end:
            found = _TOKEN.match(text, position)
            if found is None:
                raise _SyntaxError(f"cannot read {text[position : position + 20]!r}")
            quoted, bare, mark = found.groups()
            kind: Literal["quoted", "bare", "mark"] = "quoted" if quoted else "bare" if bare else "mark"
            self._tokens.append((_unquote(quoted) if quoted else bare or mark, kind))
            position = found.end()

    def at(self, expected: str) -> bool:
        """Take the next token if it is the keyword or mark `expected`; what is quoted is neither."""
        if self._next < len(self._tokens) and self._tokens[self._next] in ((expected, "bare"), (expected, "mark")):
            self._next += 1
            return True
        return False

    def take(self, expected: str) -> None:
        if not self.at(expected):
            found = self._tokens[self._next][0] if self._next < len(self._tokens) else "the end of the line"
            raise _SyntaxError(f"expected {expected!r}, found {found!r}")

    def name(self) -> str:
        if self._next >= len(self._tokens) or self._tokens[self._next][1] == "mark":
            raise _SyntaxError("expected a name")
        self._next += 1
        return self._tokens[self._next - 1][0]

    def number(self) -> int:
        text = self.name()
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= _LARGEST):
            raise _SyntaxError(f"expected a number below 2**63, found {text[:20]!r}")
        return int(text)

    def items(self, left: str, item: Callable[[], _T], right: str) -> tuple[_T, ...]:
        """Items between brackets, separated by commas."""
        self.take(left)
        found: list[_T] = []
        while not self.at(right):
            if found:
                self.take(",")
            found.append(item())
        return tuple(found)

    def region(self) -> Region:
        buffer = self.name()
        self.take("[")
        start = self.number()
        self.take(":")
        end = self.number()
        if end < start:
            raise _SyntaxError(f"region of {buffer!r} ends at {end}, before its start {start}")
        rows, pitch = 1, 0
        if self.at("rows"):
            rows = self.number()
            self.take("pitch")
            pitch = self.number()
            if rows < 2:
                raise _SyntaxError(f"region of {buffer!r} has {rows} rows of a pitch, expected 2 or more")
        self.take("]")
        return Region(buffer, start, (end - start) * rows, rows, pitch)

    def regions(self) -> tuple[Region, ...]:
        return self.items("(", self.region, ")")

    def pair(self) -> tuple[int, int]:
        first = self.number()
        self.take("=")
        return first, self.number()

    def extent(self) -> Extent:
        axis = self.number()
        self.take("=")
        return Extent(axis, self.name())

    def sized(self) -> Sized:
        axis = self.number()
        self.take("=")
        text = self.name()
        try:
            evaluator(text)
        except (SyntaxError, ValueError) as error:
            raise _SyntaxError(f"{text[:40]!r} is no size") from error
        return Sized(axis, text)

    def grid(self) -> Grid:
        function = self.name()
        self.take("blocks")
        blocks = self.number()
        self.take("threads")
        threads = self.number()
        shared_bytes = self.number() if self.at("shared") else 0
        scalars = self.items("(", self.number, ")") if self.at("scalars") else ()
        maps = self.items("(", self.tensor_map, ")") if self.at("maps") else ()
        return Grid(function, blocks, threads, scalars, shared_bytes, maps, self.at("cooperative"))

    def tensor_map(self) -> TensorMap:
        argument = self.number()
        self.take("of")
        item_bytes, extents = self.number(), self.items("[", self.number, "]")
        self.take("strides")
        strides = self.items("[", self.number, "]")
        self.take("box")
        box = self.items("[", self.number, "]")
        self.take("swizzle")
        return TensorMap(argument, item_bytes, extents, strides, box, self.number())

    def tensor_type(self) -> TensorType:
        storage = self.name()
        packed = PACKED_TYPES.get(storage)
        if packed is None and not is_dtype(storage):
            raise _SyntaxError(f"unknown element type {storage!r}")
        return TensorType(self.items("[", self.number, "]"), packed or storage, packed is not None)

    def end(self) -> None:
        if self._next < len(self._tokens):
            raise _SyntaxError(f"unexpected {self._tokens[self._next][0]!r}")


class _Parser:
    """Collects the parts of a plan line by line."""

    def __init__(self) -> None:
        self._header: tuple[int, str] | None = None
        self._spaces: list[Space] = []
        self._buffers: list[Buffer] = []
        self._ports: dict[str, list[Port]] = {"input": [], "output": []}
        self._states: list[State] = []
        self._kernels: list[Kernel] = []
        self._steps: list[Step] = []
        self._dims: list[Dim] = []

    def parse(self, text: str) -> Plan:
        for number, content in enumerate(text.split("\n"), 1):
            try:
                if content.strip():
                    self._line(_Line(content))
            except _SyntaxError as error:
                raise ProgramFileError(
                    f"plan line {number}", str(error), "the plan is corrupt; compile the model again"
                ) from error
        if self._header is None:
            raise ProgramFileError("plan", "it is empty", "compile the model again")
        version, target = self._header
        return Plan(
            target=target,
            inputs=tuple(self._ports["input"]),
            outputs=tuple(self._ports["output"]),
            spaces=tuple(self._spaces),
            buffers=tuple(self._buffers),
            kernels=tuple(self._kernels),
            steps=tuple(self._steps),
            version=version,
            states=tuple(self._states),
            dims=tuple(self._dims),
        )

    def _line(self, line: _Line) -> None:
        keyword = line.name()
        if (self._header is None) != (keyword == "plan"):
            raise _SyntaxError("expected the header 'plan', once, first")
        match keyword:
            case "plan":
                self._header = (line.number(), line.name())
                if self._header[0] != FORMAT_VERSION:
                    raise _SyntaxError(f"this prefuse reads plans of version {FORMAT_VERSION}, not {self._header[0]}")
            case "dim":
                self._dims.append(_parse_dim(line))
            case "space":
                self._spaces.append(_parse_space(line))
            case "buffer":
                self._buffers.append(_parse_buffer(line))
            case "input" | "output":
                self._ports[keyword].append(_parse_port(line))
            case "state":
                self._states.append(_parse_state(line))
            case "kernel":
                self._kernels.append(_parse_kernel(line))
            case _:
                self._steps.append(_parse_step(keyword, line))
        line.end()


def _parse_dim(line: _Line) -> Dim:
    name = line.name()
    line.take("from")
    least = line.number()
    line.take("to")
    greatest = line.number()
    line.take("by")
    multiple = line.number()
    if not name.isidentifier() or least > greatest or multiple < 1:
        raise _SyntaxError(f"no sizes of {name!r} from {least} to {greatest} by {multiple}")
    return Dim(name, least, greatest, multiple)


def _parse_space(line: _Line) -> Space:
    name = line.name()
    line.take("size")
    return Space(name, line.number(), line.number() if line.at("capacity") else None)


def _parse_buffer(line: _Line) -> Buffer:
    name, role = line.name(), line.name()
    if role not in tuple(Role):
        raise _SyntaxError(f"unknown role {role!r}")
    line.take("size")
    size_bytes = line.number()
    line.take("in")
    space, offset = line.name(), line.number() if line.at("at") else None
    return Buffer(name, Role(role), size_bytes, space, offset, line.name() if line.at("renews") else None)


def _parse_port(line: _Line) -> Port:
    name, type_ = line.name(), line.tensor_type()
    line.take("in")
    buffer = line.name()
    extents = line.items("(", line.extent, ")") if line.at("extents") else ()
    return Port(name, type_, buffer, extents, line.items("(", line.sized, ")") if line.at("sizes") else ())


def _parse_state(line: _Line) -> State:
    name, type_ = line.name(), line.tensor_type()
    line.take("in")
    return State(name, type_, line.name(), line.name() if line.at("initial") else None)


def _parse_kernel(line: _Line) -> Kernel:
    symbol = line.name()
    line.take("template")
    template = line.name()
    line.take("arguments")
    arguments = line.number()
    line.take("flops")
    flops = line.number()
    line.take("bytes")
    bytes_moved = line.number()
    multiplies = line.name() if line.at("multiplies") else "float32"
    grids = line.items("(", line.grid, ")") if line.at("grids") else ()
    return Kernel(symbol, template, arguments, flops, bytes_moved, grids, multiplies)


def _parse_step(keyword: str, line: _Line) -> Step:
    match keyword:
        case "launch":
            return _parse_launch(line)
        case "host":
            function, reads = line.name(), line.regions()
            line.take("->")
            return Host(function, reads, line.regions(), _parse_stream(line))
        case "copy":
            source = line.region()
            line.take("->")
            return Copy(source, line.region(), _parse_stream(line))
        case "record":
            return Record(line.number(), _parse_stream(line))
        case "wait":
            return Wait(line.number(), _parse_stream(line))
    raise _SyntaxError(f"unknown keyword {keyword!r}")


def _parse_launch(line: _Line) -> Launch:
    kernel, reads = line.name(), line.regions()
    line.take("->")
    writes = line.regions()
    scratch = line.regions() if line.at("scratch") else ()
    inplace = line.items("(", line.pair, ")") if line.at("inplace") else ()
    label = line.name() if line.at("label") else ""
    return Launch(kernel, reads, writes, scratch, inplace, _parse_stream(line), label)


def _parse_stream(line: _Line) -> int:
    return line.number() if line.at("stream") else 0


def _unquote(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError as error:
        raise _SyntaxError(f"malformed name {text[:40]}") from error


def is_dtype(name: str) -> bool:
    """Whether `name` is the canonical name of a numeric NumPy or ml_dtypes type."""
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        return False
    return dtype.name == name and (dtype.kind in "biufc" or dtype.type.__module__ == "ml_dtypes")
