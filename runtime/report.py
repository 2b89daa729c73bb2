"""What a compiled program consists of, for people."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from .plan import SHARED, Copy, Host, Kernel, Launch, Plan, Role
from .program_file import Program

_SHOWN = 20  # lines of each list


def render_report(program: Program) -> str:
    """A few lines on the program's name, memory, kernels by template, fused groups, and what its manifest's "report" says.

    Of "report", a mapping, each entry is shown under its name: a list line by line, anything else in one line.
    """
    return "\n".join((*_summary(program), *_templates(program.plan), *_groups(program.plan), *_reported(program.manifest)))


def _summary(program: Program) -> Iterator[str]:
    plan = program.plan
    launches = sum(isinstance(step, Launch) for step in plan.steps)
    copies = sum(isinstance(step, Copy) for step in plan.steps)
    host = sum(isinstance(step, Host) for step in plan.steps)
    yield f"{program.manifest.get('name', 'model')} for {plan.target}"
    for kind, ports in (("input", plan.inputs), ("output", plan.outputs)):
        yield from (f"  {kind} {port.name}: {port.type_text}" for port in ports)
    yield f"  {launches} launches of {len(plan.kernels)} kernels, {copies} copies, {host} host steps"
    if functions := {grid.function for kernel in plan.kernels for grid in kernel.grids}:
        symbols = {kernel.symbol: len(kernel.grids) for kernel in plan.kernels}
        grids = sum(symbols[step.kernel] for step in plan.steps if isinstance(step, Launch))
        yield f"  code for {plan.target}: {size(len(program.library))}, {len(functions)} functions, {grids} grids a call"
    for space in plan.spaces:
        lying = [buffer for buffer in plan.buffers if buffer.space == space.name]
        held = ", ".join(sorted({one.role for one in lying if one.offset is not None or space.name == SHARED}))
        bound = "" if space.capacity_bytes is None else f" of {size(space.capacity_bytes)}"
        if held:
            yield f"  memory {space.name}: {size(space.size_bytes)}{bound} ({held})"
    yield f"  activations without sharing: {size(sum(b.size_bytes for b in plan.buffers if b.role is Role.ACTIVATION))}"


def _templates(plan: Plan) -> Iterator[str]:
    kernels = {kernel.symbol: kernel for kernel in plan.kernels}
    used: dict[str, list[Kernel]] = defaultdict(list)
    for step in plan.steps:
        if isinstance(step, Launch) and step.kernel in kernels:
            used[kernels[step.kernel].template].append(kernels[step.kernel])
    yield "templates:"
    for template, launched in sorted(used.items(), key=lambda item: (-sum(kernel.flops for kernel in item[1]), item[0])):
        flops, moved = sum(kernel.flops for kernel in launched), sum(kernel.bytes_moved for kernel in launched)
        yield f"  {template}: {len(launched)} launches, {flops / 1e6:.3f} MFLOP, {size(moved)} moved"


def _groups(plan: Plan) -> Iterator[str]:
    labels = Counter(step.label for step in plan.steps if isinstance(step, Launch) and step.label)
    yield from _listed("groups", [f"{label} x {count}" if count > 1 else label for label, count in labels.most_common()])


def _reported(manifest: Mapping[str, object]) -> Iterator[str]:
    report = manifest.get("report")
    for key, value in report.items() if isinstance(report, Mapping) else ():
        if isinstance(value, list):
            yield from _listed(str(key).replace("_", " "), [str(item) for item in value])
        else:
            yield f"{str(key).replace('_', ' ')}: {value}"


def _listed(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield f"{title}:"
        yield from (f"  {line}" for line in lines[:_SHOWN])
        if len(lines) > _SHOWN:
            yield f"  and {len(lines) - _SHOWN} more"


def size(count: int) -> str:
    """A number of bytes with a binary unit."""
    power = _unit_of(count)
    return f"{count / 1024**power:.2f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}" if power else f"{count} B"


def speakable_bytes(count: int) -> int:
    """The fewest bytes, at least `count`, that a limit has which is given as `size` tells them."""
    unit = 1 << 10 * _unit_of(count)
    return -(-100 * count // unit) * unit // 100


def _unit_of(count: int) -> int:
    """The power of 1024 that is the unit of so many bytes."""
    return max(0, min(4, (count.bit_length() - 1) // 10))
