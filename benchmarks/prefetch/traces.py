"""Traces of training steps: those of G10, and one derived from GPT-2's arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefuse.passes.plan.prefetch.problem import Object, Problem, Step, Tier, Use

G10_LIMIT = 40 * 2**30  # bytes of an A100
G10_LINK = 15.754e9  # bytes a second of PCIe 3.0, each way, as published
G10_HOST = 128 * 2**30  # bytes
G10_SSD = 3.2e9  # bytes a second, each way


def problem_of(
    seconds: Sequence[float],
    reads: Sequence[Sequence[int]],
    writes: Sequence[Sequence[int]],
    sizes: Sequence[int],
    limit_bytes: int,
    tiers: tuple[Tier, ...],
) -> Problem:
    """Kernels that read and write tensors, a training's step. What its first kernel reads is kept from the step before: weights
    and states."""
    uses: list[dict[int, bool]] = [{} for _ in sizes]
    for step, (read, written) in enumerate(zip(reads, writes, strict=True)):
        for j in read:
            uses[j].setdefault(step, False)
        for j in written:
            uses[j][step] = True
    objects = []
    for j, (size, used) in enumerate(zip(sizes, uses, strict=True)):
        ordered = tuple(Use(step, is_written) for step, is_written in sorted(used.items()))
        is_kept = bool(ordered) and j in reads[ordered[0].step]
        objects.append(Object(size, ordered, is_kept, is_kept))
    return Problem(tuple(map(Step, seconds)), tuple(objects), limit_bytes, tiers, is_periodic=True)


def g10_tiers(has_ssd: bool) -> tuple[Tier, ...]:
    """The host without end; or what G10 assumes: 128 GiB of it and an SSD, whose copies take their share of the one link."""
    if not has_ssd:
        return (Tier(G10_LINK, G10_LINK),)
    host = G10_LINK - G10_SSD
    return (Tier(host, host, capacity_bytes=G10_HOST), Tier(G10_SSD, G10_SSD))


def read_g10(path: Path, tiers: tuple[Tier, ...], limit_bytes: int = G10_LIMIT) -> Problem:
    """A trace of G10 (Zhang et al., MICRO 2023): a line "id:bytes:is_weight ...", then "ms;reads;writes;name" for each kernel."""
    first, *lines = path.read_text().splitlines()
    tensors = [tuple(map(int, tensor.split(":"))) for tensor in first.split()]
    index = {number: j for j, (number, _, _) in enumerate(tensors)}
    kernels = [line.split(";") for line in lines]
    reads, writes = ([[index[int(j)] for j in kernel[part].split(",") if j] for kernel in kernels] for part in (1, 2))
    seconds = [float(kernel[0]) / 1e3 for kernel in kernels]
    return problem_of(seconds, reads, writes, [size for _, size, _ in tensors], limit_bytes, tiers)


class _Tape:
    """Kernels as they are run; each takes as long as its arithmetic or its bytes do."""

    def __init__(self, flops_per_second: float, bytes_per_second: float) -> None:
        self._flops, self._bandwidth = flops_per_second, bytes_per_second
        self.sizes: list[int] = []
        self.seconds: list[float] = []
        self.reads: list[tuple[int, ...]] = []
        self.writes: list[tuple[int, ...]] = []

    def tensor(self, elements: int) -> int:
        self.sizes.append(4 * elements)
        return len(self.sizes) - 1

    def run(self, reads: Sequence[int], writes: Sequence[int], flops: float = 0.0) -> None:
        moved = sum(self.sizes[j] for j in (*reads, *writes))
        self.seconds.append(max(flops / self._flops, moved / self._bandwidth))
        self.reads.append(tuple(reads))
        self.writes.append(tuple(writes))


class _Weight:
    """A parameter, its gradient and the two moments of Adam."""

    def __init__(self, tape: _Tape, elements: int) -> None:
        self.value, self.mean, self.variance = (tape.tensor(elements) for _ in range(3))
        self.elements = elements
        self.gradient = -1


class _Training:
    """One step of training: each method runs a layer forward and remembers how it runs backward."""

    def __init__(self, tape: _Tape, tokens: int) -> None:
        self.tape, self.tokens = tape, tokens
        self.weights: list[_Weight] = []

    def weight(self, elements: int) -> _Weight:
        self.weights.append(_Weight(self.tape, elements))
        return self.weights[-1]

    def activation(self, width: int) -> int:
        return self.tape.tensor(self.tokens * width)

    def gradient(self, weight: _Weight) -> int:
        """Where the gradient is added up; born by the first that adds to it."""
        if weight.gradient < 0:
            weight.gradient = self.tape.tensor(weight.elements)
        return weight.gradient

    def linear(self, x: int, weight: _Weight, n: int, m: int) -> int:
        y = self.activation(m)
        self.tape.run([x, weight.value], [y], 2.0 * self.tokens * n * m)
        return y

    def linear_back(self, dy: int, x: int, weight: _Weight, n: int, m: int) -> int:
        dx = self.activation(n)
        self.tape.run([dy, weight.value], [dx], 2.0 * self.tokens * n * m)
        self.tape.run([dy, x], [self.gradient(weight)], 2.0 * self.tokens * n * m)
        return dx

    def pointwise(self, reads: Sequence[int], width: int) -> int:
        y = self.activation(width)
        self.tape.run(reads, [y])
        return y

    def norm_back(self, dy: int, x: int, weight: _Weight, width: int, beside: int) -> int:
        """Through a normalisation, and added to the gradient that goes around it."""
        dx = self.activation(width)
        self.tape.run([dy, x, weight.value, beside], [dx, self.gradient(weight)])
        return dx


def gpt2(
    batch: int,
    flops_per_second: float,
    *,
    layers: int = 36,
    width: int = 1280,
    sequence: int = 1024,
    vocabulary: int = 50257,
    bytes_per_second: float = 1.3e12,
    limit_bytes: int = 8 * 10**9,
    link: float = 26.2e9,
) -> Problem:
    """A step of training GPT-2 (774M by default): forward, backward, Adam; all in float32, no probabilities of attention kept.

    Matrix products take their 2mnk operations at `flops_per_second`, all else its bytes at `bytes_per_second`.
    """
    tape = _Tape(flops_per_second, bytes_per_second)
    run = _Training(tape, batch * sequence)
    attention = 2.0 * batch * sequence * sequence * width  # two products, of which the mask leaves half
    embedding = run.weight((vocabulary + sequence) * width)
    x = run.pointwise([embedding.value], width)
    blocks = []
    for _ in range(layers):
        norms = run.weight(2 * width), run.weight(2 * width)
        sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        qkv, project, up, down = (run.weight(n * m + m) for n, m in sizes)
        h = run.pointwise([x, norms[0].value], width)
        q = run.linear(h, qkv, width, 3 * width)
        a = run.activation(width)
        tape.run([q], [a], attention)
        middle = run.pointwise([x, run.linear(a, project, width, width)], width)
        g = run.pointwise([middle, norms[1].value], width)
        u = run.linear(g, up, width, 4 * width)
        r = run.pointwise([u], 4 * width)
        blocks.append((norms, (qkv, project, up, down), (x, h, q, a, middle, g, u, r)))
        x = run.pointwise([middle, run.linear(r, down, 4 * width, width)], width)
    last = run.weight(2 * width)
    h = run.pointwise([x, last.value], width)
    logits = run.linear(h, embedding, width, vocabulary)
    dx = run.linear_back(run.pointwise([logits], vocabulary), h, embedding, width, vocabulary)
    around = run.activation(width)
    tape.run([dx, x, last.value], [around, run.gradient(last)])
    for norms, (qkv, project, up, down), (x, h, q, a, middle, g, u, r) in reversed(blocks):
        du = run.pointwise([run.linear_back(around, r, down, 4 * width, width), u], 4 * width)
        around = run.norm_back(run.linear_back(du, g, up, width, 4 * width), middle, norms[1], width, around)
        da, dq = run.linear_back(around, a, project, width, width), run.activation(3 * width)
        tape.run([da, q, a], [dq], 2.5 * attention)  # five products for two, as the probabilities are made again
        around = run.norm_back(run.linear_back(dq, h, qkv, width, 3 * width), x, norms[0], width, around)
    tape.run([around], [run.gradient(embedding)])
    for weight in run.weights:
        states = [weight.value, weight.mean, weight.variance]
        tape.run([*states, weight.gradient], states)
    return problem_of(tape.seconds, tape.reads, tape.writes, tape.sizes, limit_bytes, (Tier(link, link),))
