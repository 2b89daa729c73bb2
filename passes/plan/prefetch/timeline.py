"""When steps and copies begin and end, if each waits for what a schedule says and for nothing else."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from .problem import Problem
from .schedule import CopyIn, CopyOut, Schedule


@dataclass(frozen=True, slots=True)
class Span:
    """When a step or a copy begins and ends, in seconds."""

    begin: float
    end: float


class Timeline:
    """The times at which steps and copies of several calls begin and end."""

    def __init__(self, problem: Problem, schedule: Schedule, calls: int) -> None:
        self.problem, self.schedule, self.calls = problem, schedule, calls
        self.count = len(problem.steps)
        tiers = range(len(problem.tiers))
        self.ins: list[list[tuple[int, CopyIn]]] = [
            [(call, copy) for call in range(calls) for copy in schedule.copies_in if copy.tier == tier] for tier in tiers
        ]
        self.outs: list[list[tuple[int, CopyOut]]] = [
            [(call, copy) for call in range(calls) for copy in schedule.copies_out if copy.tier == tier] for tier in tiers
        ]
        self.outs_of_call = [sum(copy.tier == tier for copy in schedule.copies_out) for tier in tiers]
        self.steps: list[Span] = []
        self.spans_in: list[list[Span]] = [[] for _ in tiers]
        self.spans_out: list[list[Span]] = [[] for _ in tiers]
        # What each step waits for: (tier, place) of copies in, and out.
        self._needs_in, self._needs_out = defaultdict(list), defaultdict(list)
        for tier in tiers:
            for place, (call, copy) in enumerate(self.ins[tier]):
                self._needs_in[call * self.count + copy.before_step].append((tier, place))
            for place, (call, out) in enumerate(self.outs[tier]):
                if out.before_step is not None:
                    self._needs_out[call * self.count + out.before_step].append((tier, place))

    def run(self) -> str:
        """Go on until all is done; or say why it cannot be."""
        total = self.calls * self.count
        while True:
            has_moved = self._step() if len(self.steps) < total else False
            for tier in range(len(self.problem.tiers)):
                has_moved |= self._copy_in(tier) | self._copy_out(tier)
            if not has_moved:
                break
        if len(self.steps) < total:
            return f"step {len(self.steps) % self.count} and copies wait for each other forever"
        return ""

    def _step(self) -> bool:
        step = len(self.steps)
        needed = [(self.spans_in, *need) for need in self._needs_in[step]] + [(self.spans_out, *n) for n in self._needs_out[step]]
        if any(place >= len(spans[tier]) for spans, tier, place in needed):
            return False
        begin = max([self._step_end(step - 1), *(spans[tier][place].end for spans, tier, place in needed)])
        self.steps.append(Span(begin, begin + self.problem.steps[step % self.count].seconds))
        return True

    def _step_end(self, step: int) -> float:
        return self.steps[step].end if step >= 0 else 0.0

    def _copy_in(self, tier: int) -> bool:
        place = len(self.spans_in[tier])
        if place == len(self.ins[tier]):
            return False
        call, copy = self.ins[tier][place]
        step = call * self.count + copy.after_step
        outs = [call * self.outs_of_call[t] + after for t, after in enumerate(copy.after_outs)]
        if step >= len(self.steps) or any(outs[t] > len(self.spans_out[t]) for t in range(len(outs))):
            return False
        ends = [self.spans_out[t][outs[t] - 1].end for t in range(len(outs)) if outs[t] > 0]
        begin = max([self._step_end(step), *ends, *(span.end for span in self.spans_in[tier][-1:])])
        seconds = self.problem.tiers[tier].seconds_in(self.problem.objects[copy.object].size_bytes)
        self.spans_in[tier].append(Span(begin, begin + seconds))
        return True

    def _copy_out(self, tier: int) -> bool:
        place = len(self.spans_out[tier])
        if place == len(self.outs[tier]):
            return False
        call, copy = self.outs[tier][place]
        step = call * self.count + copy.after_step
        if step >= len(self.steps):
            return False
        begin = max([self._step_end(step), *(span.end for span in self.spans_out[tier][-1:])])
        seconds = self.problem.tiers[tier].seconds_out(self.problem.objects[copy.object].size_bytes)
        self.spans_out[tier].append(Span(begin, begin + seconds))
        return True
