"""Versions of a kernel whose sizes a call decides: where other templates are cheaper at other sizes, each has code in the kernel,
and a comparison chooses.

Every version is right for all sizes. It is written where the hint is a size of its own, which decides the template and all that
templates choose by what they estimate. Only convolutions have versions: their weights, which each packs in its own way, are few
beside their results, where those of products of a language model would be in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from tvm import tirx

from ..runtime.plan import DIMENSIONS
from ..runtime.symbolic.sizes import Domain, Size
from ..runtime.target import Target
from .codegen.builder import KernelBuilder
from .codegen.dimensions import dimensions
from .groups.group import Group
from .symbolic import write_symbolic
from .template.contract import BuiltKernel, Operand, Refusal
from .template.kernel import new_builder
from .template.values import anchors_of

_ANCHORS = frozenset(["Conv", "ConvTranspose"])
_PROBES = 7  # sizes at which templates are compared
_WORTH = 1.25  # times as long as the best template takes what another version saves: estimates are within a fifth
_WORTH_CYCLES = 10_000  # saved in a call, at least
_MOST_VERSIONS = 3
Times = Mapping[str, float]  # cycles, by template; the one to take comes first


@dataclass(frozen=True)
class Version:
    """A template for calls whose results have up to `most` elements (None: all others), chosen at point `at` of the domain."""

    template: str
    at: int
    most: int | None


def versions_of(group: Group, domain: Domain, taken: str, times_at: Callable[[], Times]) -> tuple[Version, ...]:
    """The versions of a kernel in the order of their results' elements; one, where the template that is taken at the hint is as
    good as any at all sizes. `times_at()` are those of the candidates where the hint is."""
    elements = group.types[group.outputs[0]].elements
    is_convolution = any(op.op_type in _ANCHORS for op in anchors_of(group))
    if not isinstance(elements, Size) or not is_convolution or group.shares_weights:
        return (Version(taken, domain.at, None),)
    found: list[tuple[str, int, int]] = []  # template, point, elements
    for at in _probes(elements.values, domain.alive):
        with _hinted(domain, at):
            times = times_at()
        best = next(iter(times), taken)
        saved = times.get(taken, np.inf) - times.get(best, np.inf)
        is_worth = saved > _WORTH_CYCLES and times[taken] > _WORTH * times[best] if taken in times else bool(times)
        found.append((best if is_worth else taken, at, int(elements.values[at])))
    return _joined(found, taken, domain.at)


@contextmanager
def _hinted(domain: Domain, at: int) -> Iterator[None]:
    """Inside, the hint is another point of the domain."""
    before, domain.at = domain.at, at
    try:
        yield
    finally:
        domain.at = before


def _probes(values: np.ndarray, alive: np.ndarray) -> list[int]:
    """Points whose values are spread evenly by their logarithms, from the least to the greatest."""
    points = np.flatnonzero(alive)
    logarithms = np.log(np.maximum(values[points], 1))
    wanted = np.linspace(logarithms.min(), logarithms.max(), _PROBES)
    return list(dict.fromkeys(int(points[np.abs(logarithms - one).argmin()]) for one in wanted))


def _joined(found: Sequence[tuple[str, int, int]], taken: str, hint: int) -> tuple[Version, ...]:
    """Runs of probes with one template, each chosen at the middle one; at the hint, where it is the template taken there."""
    runs: list[list[tuple[str, int, int]]] = []
    for one in found:
        if runs and runs[-1][-1][0] == one[0]:
            runs[-1].append(one)
        else:
            runs.append([one])
    if not 1 < len(runs) <= _MOST_VERSIONS:
        return (Version(taken, hint, None),)
    joined = []
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        template, at, _ = run[len(run) // 2]
        most = None if following is None else round((run[-1][2] * following[0][2]) ** 0.5)
        joined.append(Version(template, hint if template == taken else at, most))
    return tuple(joined)


def with_versions(
    built: BuiltKernel,
    group: Group,
    target: Target,
    domain: Domain,
    versions: Sequence[Version],
    write: Callable[[str], BuiltKernel | Refusal],
) -> BuiltKernel:
    """The kernel that is `built` for the hint, together with the others; as it is, where one of those is not for all sizes."""
    kernels = []
    for version in versions:
        kernel = built if version.at == domain.at else _written_at(version, domain, write)
        if kernel is None:
            return built
        kernels.append(kernel)
    return _merged(built, kernels, group, target, domain, versions) if len(kernels) > 1 else built


def _written_at(version: Version, domain: Domain, write: Callable[[str], BuiltKernel | Refusal]) -> BuiltKernel | None:
    """A version; None where its template refuses, or would cut the domain."""
    alive, cuts = domain.alive, len(domain.cuts)
    with _hinted(domain, version.at):
        kernel = write_symbolic(lambda: write(version.template), domain)
    if domain.alive is not alive:
        domain.alive = alive
        del domain.cuts[cuts:]
        return None
    return None if isinstance(kernel, Refusal) else kernel


def _merged(
    built: BuiltKernel,
    kernels: Sequence[BuiltKernel],
    group: Group,
    target: Target,
    domain: Domain,
    versions: Sequence[Version],
) -> BuiltKernel:
    """One kernel of several, which have no barriers: operands of all, and the workspace of the largest."""
    operands = tuple(dict.fromkeys(operand for kernel in kernels for operand in kernel.operands))
    inplace = tuple(pair for pair in _pairs(kernels[0]) if all(pair in _pairs(other) for other in kernels[1:]))
    with dimensions(domain):
        builder = new_builder(target)
        elements = builder.bind(group.types[group.outputs[0]].elements)
        names = {operand: _declared(builder, number, operand, kernels, group) for number, operand in enumerate(operands)}
        builder.load_dimensions()
        for name in group.outputs:
            builder.parameter(name, group.types[name].elements, group.types[name].dtype)
        builder.order_parameters((*names.values(), *group.outputs))
        before = None
        for version, kernel in zip(versions, kernels, strict=True):
            conditions = [] if version.most is None else [elements <= version.most]
            conditions += [] if before is None else [elements > before]
            with builder.when(tirx.all(*conditions)):
                builder.inline(
                    kernel.function, [*(names[one] for one in kernel.operands), *group.outputs], kernel.workspace_bytes
                )
            before = version.most
        function = builder.function(aliased=bool(inplace))
    return replace(
        built,
        function=function,
        operands=operands,
        workspace_bytes=builder.workspace_bytes,
        inplace=tuple((output, operands.index(operand)) for output, operand in inplace),
        multiplies=max(kernel.multiplies for kernel in kernels),  # tiles, where one has them
    )


def _pairs(kernel: BuiltKernel) -> list[tuple[int, Operand]]:
    return [(output, kernel.operands[operand]) for output, operand in kernel.inplace]


def _declared(builder: KernelBuilder, number: int, operand: Operand, kernels: Sequence[BuiltKernel], group: Group) -> str:
    """Declare the parameter of an operand, of the type that the first kernel with it gives its pointer; its name."""
    if operand.name == DIMENSIONS:
        return DIMENSIONS
    kind = group.types[operand.name]
    kind = kind if operand.pack is None else operand.pack.packed_type(kind)
    first = next(kernel for kernel in kernels if operand in kernel.operands)
    pointer = first.function.params[first.operands.index(operand)]
    name = f"{operand.name}/version{number}" if operand.pack is not None else operand.name
    builder.parameter(name, kind.elements, str(pointer.ty.element_type))
    return name


def described(versions: Sequence[Version], taken: str) -> dict[str, str]:
    """Which calls the other templates of a kernel compute, for reports."""
    found, before = dict[str, str](), 0
    for version in versions:
        if version.template != taken:
            some = [f"more than {before:,}"] * (before > 0) + ([] if version.most is None else [f"up to {version.most:,}"])
            found[version.template] = f"only for calls whose results have {' and '.join(some)} elements"
        before = version.most or before
    return found
