"""What to copy and when, decided as simulated time goes by.

Rules, after Cao, Felten, Karlin and Li (SIGMETRICS 1995), whose "aggressive" integrated prefetching and caching they extend by
sizes, copies out, and a stream for these:

- what is missing comes in by the order of its next use, as soon as it fits until that use beside all that is live;
- room for it is made at the last moment, by dropping clean objects whose next use is later, the furthest first;
- a stream out that is idle cleans the dirty object with the furthest next use, once it is foreseen that something dirty has to
  leave. To clean is not to drop;
- where a second tier is needed, what goes there has its own plan (`overflow.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from .events import Boundary, Event, Happening
from .overflow import Absence
from .problem import Problem, Step
from .window import Window

NEVER = 1 << 60  # the next use of what is not used again


class StuckError(RuntimeError):
    """Nothing can go on: a fault of the rules, for every step fits in the memory by itself."""


class Simulation:
    """The state of memory and streams at a moment. Steps are counted over all calls.

    With a `boundary`, one call is simulated that begins with what this says, and ends with the same.
    """

    def __init__(
        self, problem: Problem, boundary: Boundary | None = None, absences: Mapping[int, Absence] = MappingProxyType({})
    ) -> None:
        self._boundary = boundary
        self._last = len(problem.steps) if boundary else NEVER  # the step that stands for the next call
        staying = boundary.inside if boundary else frozenset()
        if boundary:
            problem = replace(problem, steps=(*problem.steps, Step(0.0)), is_periodic=False)
        self.problem = problem
        self._count = len(problem.steps)
        self._sizes = np.array([item.size_bytes for item in problem.objects], np.int64)
        self._touched, self._olds, self._writes, self._deaths = _by_step(problem, staying)
        self._uses = [[use.step for use in item.uses] for item in problem.objects]
        self._is_kept = np.array([item.is_kept for item in problem.objects], bool)
        self._inputs = np.array([j for j, item in enumerate(problem.objects) if item.is_outside and not item.is_kept], np.int64)
        count = len(problem.objects)
        self._position = [0] * count
        self._next = np.array([uses[0] if uses else NEVER for uses in self._uses], np.int64)
        self._has_value = np.array([item.is_outside for item in problem.objects], bool)
        self._is_inside, self._is_ready, self._is_dirty, self._is_leaving, self._is_unused, self._is_locked = np.zeros(
            (6, count), bool
        )
        self._tier = np.zeros(count, np.int64)  # of the value outside, or where it will be
        self._absences = absences
        self._tier[list(absences)] = 1
        self._is_stored = np.array([item.is_outside for item in problem.objects], bool)  # has its place in its tier
        self._stored = [0] * len(problem.tiers)  # bytes
        self._capacity = [NEVER if tier.capacity_bytes is None else tier.capacity_bytes for tier in problem.tiers]
        self._goes_next: deque[int] = deque()  # to the second tier, as planned
        self._lasts: list[list[int]] = [[] for _ in problem.steps]
        self._outs: list[list[int]] = [[] for _ in problem.steps]
        self._late: set[int] = set()  # inside, though planned to be out, or soon to be; the window knows
        for absence in absences.values():
            self._lasts[absence.last].append(absence.object)
            self._outs[absence.out].append(absence.object)
        self._doomed: set[int] = set()  # dead while they go out
        self._lanes_in: list[tuple[float, int] | None] = [None] * len(problem.tiers)
        self._lanes_out: list[tuple[float, int] | None] = [None] * len(problem.tiers)
        self._window = Window(problem, staying, absences.values())
        self._used = 0
        self._ends: float | None = None  # when the running step does
        self.now = 0.0
        self.step = 0
        self.log: list[Event] = []
        if boundary:
            self._enter(boundary)
        self._lock()

    def _enter(self, boundary: Boundary) -> None:
        for j in boundary.inside:
            self._is_inside[j] = self._is_ready[j] = True
            self._is_dirty[j] = j in boundary.dirty
            self._used += int(self._sizes[j])
            self._window.add(0, int(self._next[j]), int(self._sizes[j]))

    def run_call(self) -> list[Event]:
        """Go on to the end of a call; what happened in it."""
        self.log = []
        goal = self.step + self._count
        while self.step < goal:
            while self._start_step() or self._fetch() or self._room_for_results() or self._clean():
                pass
            if self.step == self._last and self._is_closed():
                return self.log
            self._wait()
        return self.log

    def boundary(self) -> Boundary:
        """What of the objects that are kept is inside, or on its way in."""
        is_kept = self._is_inside & self._is_kept
        return Boundary(*(frozenset(np.flatnonzero(mask).tolist()) for mask in (is_kept, is_kept & self._is_dirty)))

    def _is_closed(self) -> bool:
        """Whether the next call can begin with what this one began with; if so, all else has been dropped."""
        assert self._boundary
        inside = self._boundary.inside
        if not all(self._is_inside[j] for j in inside) or self._is_unclean().any():
            return False
        for j in np.flatnonzero(self._is_inside & self._is_kept).tolist():
            if j not in inside:
                self._note("drop", j)
        return True

    def _is_unclean(self) -> np.ndarray:
        """Objects that are dirty, but were not when the call began, or do not stay inside."""
        assert self._boundary
        is_unclean: np.ndarray = self._is_inside & self._is_dirty & self._is_kept & (self._next >= self._last)
        is_unclean[list(self._boundary.dirty)] = False
        return is_unclean

    # Steps.

    def _start_step(self) -> bool:
        if self._ends is not None or not self._goes_on or self.step == self._last:
            return False
        here = self.step % self._count
        touched = self._touched[here]
        if not self._is_ready[self._olds[here]].all() or self._is_leaving[self._writes[here]].any():
            return False
        new = touched[~self._is_inside[touched]]
        needed = int(self._sizes[new].sum()) + self.problem.steps[here].workspace_bytes
        if self._used + needed > self.problem.limit_bytes:
            return False
        self._is_inside[new] = self._is_ready[new] = self._has_value[new] = True
        self._next[new] = self.step
        self._used += needed
        self._ends = self.now + self.problem.steps[here].seconds
        self._note("begin", self.step)
        return True

    def _end_step(self) -> None:
        here = self.step % self._count
        touched = self._touched[here]
        self._is_dirty[self._writes[here]] = True
        self._is_unused[touched] = False
        self._used -= self.problem.steps[here].workspace_bytes
        self._note("end", self.step)
        self._late.difference_update(touched.tolist())
        for j in touched.tolist():
            self._next[j] = self._following(j)
        self._window.advance(self.step)
        for j in self._deaths[here]:
            if self._boundary and self._is_kept[j]:
                self._note("drop", j)  # until the next call, which this one knows nothing of
            self._has_value[j] = self._is_dirty[j] = False
            if self._is_leaving[j]:
                self._doomed.add(j)
            else:
                self._free(j)
                self._forget(j)
        self._ends = None
        self.step += 1
        self._expect(here)
        if self.step % self._count == 0 and self.problem.is_periodic:
            self._has_value[self._inputs] = True
            self._next[self._inputs] = [self.step + self._uses[j][0] if self._uses[j] else NEVER for j in self._inputs.tolist()]
        self._lock()

    def _expect(self, ended: int) -> None:
        """Objects that go to the second tier now, and those that should be there."""
        self._goes_next.extend(self._lasts[ended])
        here = self.step % self._count
        for j in self._outs[here]:
            if self._is_inside[j] and j not in self._late:
                self._count_in(j)

    def _forget(self, j: int) -> None:
        """The value of what is dead needs no place outside."""
        if self._is_stored[j] and not self.problem.objects[j].is_outside:
            self._stored[self._tier[j]] -= int(self._sizes[j])
            self._is_stored[j] = False
            self._tier[j] = 1 if j in self._absences else 0

    def _following(self, j: int) -> int:
        """The step of the next use of an object that has just been used."""
        uses = self._uses[j]
        self._position[j] += 1
        call = self.step - self.step % self._count
        if self._position[j] < len(uses):
            return call + uses[self._position[j]]
        self._position[j] = 0
        if self._boundary and j in self._boundary.inside:
            return self._last + uses[0]
        return call + self._count + uses[0] if self._is_kept[j] and self.problem.is_periodic else NEVER

    @property
    def _goes_on(self) -> bool:
        return self.problem.is_periodic or self.step < self._count

    def _lock(self) -> None:
        self._is_locked[:] = False
        if self._goes_on and self.step != self._last:
            self._is_locked[self._touched[self.step % self._count]] = True

    # Copies.

    def _fetch(self) -> bool:
        """Begin to copy in what is missing next, of each tier."""
        has_begun = False
        for tier, lane in enumerate(self._lanes_in):
            if lane is None and self._goes_on and not self._is_busy(tier, self._lanes_out):
                has_begun |= self._fetch_from(tier)
        return has_begun

    def _fetch_from(self, tier: int) -> bool:
        missing = np.flatnonzero(self._has_value & ~self._is_inside & (self._next < NEVER) & (self._tier == tier))
        if not len(missing):
            return False
        due = int(self._next[missing].min())
        first = missing[self._next[missing] == due]
        candidates = self._droppable(due)
        spare = int(self._sizes[candidates].sum())
        room = self._room_until(due, tier) + spare
        fitting = first[self._sizes[first] <= room]
        if not len(fitting):
            return False
        j = int(fitting[np.argmax(self._sizes[fitting])])  # the small ones find a place later
        size = int(self._sizes[j])
        self._make_room(size, candidates, spare)
        self._count_in(j)
        self._is_inside[j] = self._is_unused[j] = True
        self._used += size
        self._lanes_in[tier] = (self.now + self.problem.tiers[tier].seconds_in(size), j)
        self._note("in", j, tier)
        return True

    def _room_until(self, due: int, tier: int) -> int:
        """The bytes that may come now and stay to step `due` beside all that is inside and will be live; below 0: too much is."""
        most = self._used
        if due > self.step:
            most = max(most, self._window.most(self.step, due))
            if not tier and len(self._stored) > 1:
                most = max(most, self._most_with_slower(due))
        return self.problem.limit_bytes - most

    def _most_with_slower(self, due: int) -> int:
        """The most bytes that would be live before step `due` if all came now that slower tiers have for the steps until then."""
        slow = np.flatnonzero(self._has_value & ~self._is_inside & (self._tier > 0) & (self._next < due))
        profile = self._window.ahead(self.step)[: due - self.step]
        profile = profile + _until(self._next[slow] - self.step, self._sizes[slow], len(profile))
        return int(profile.max(initial=0))

    def _droppable(self, beyond: int) -> np.ndarray:
        """Clean objects that are not used before the step `beyond` is over, and have been since they came."""
        is_idle = self._is_inside & self._is_ready & ~(self._is_dirty | self._is_leaving | self._is_unused | self._is_locked)
        return np.flatnonzero(is_idle & (self._next > beyond))

    def _make_room(self, size: int, candidates: np.ndarray, spare: int) -> bool:
        """Drop as few of the candidates as will do, the furthest next use first; none if even all of them would not."""
        excess = self._used + size - self.problem.limit_bytes
        if excess > spare:
            return False
        chosen: list[int] = []
        for j in candidates[np.argsort(-self._next[candidates], kind="stable")].tolist() if excess > 0 else ():
            if excess <= 0:
                break
            chosen.append(j)
            excess -= int(self._sizes[j])
        for j in reversed(chosen):  # the last one, which is used first, may be larger than all that was too much
            if excess + int(self._sizes[j]) <= 0:
                excess += int(self._sizes[j])
                chosen.remove(j)
        for j in chosen:
            self._drop(j)
        return True

    def _drop(self, j: int) -> None:
        self._note("drop", j)
        self._count_out(j)
        self._free(j)

    def _is_in_absence(self, j: int) -> bool:
        return j in self._absences and self._absences[j].last < self.step % self._count <= self._absences[j].due

    def _count_in(self, j: int) -> None:
        """What was absent until its next use is live from now on."""
        self._window.add(self.step, int(self._next[j]), int(self._sizes[j]))
        if self._is_in_absence(j):
            self._late.add(j)

    def _count_out(self, j: int) -> None:
        """What was live until its next use is absent from now on; where that was planned, the window knows of a part."""
        end = int(self._next[j])
        if self._is_in_absence(j) and j not in self._late:
            end = min(end, self.step - self.step % self._count + self._absences[j].out)
        self._window.add(self.step, max(end, self.step), -int(self._sizes[j]))
        self._late.discard(j)

    def _free(self, j: int) -> None:
        self._is_inside[j] = self._is_ready[j] = False
        self._used -= int(self._sizes[j])

    def _room_for_results(self) -> bool:
        """Room for what the next step writes, once all that it reads is there."""
        if self._ends is not None or not self._goes_on or self.step == self._last:
            return False
        here = self.step % self._count
        touched = self._touched[here]
        if not self._is_ready[self._olds[here]].all():
            return False
        needed = int(self._sizes[touched[~self._is_inside[touched]]].sum()) + self.problem.steps[here].workspace_bytes
        if self._used + needed <= self.problem.limit_bytes:
            return False
        candidates = self._droppable(self.step)
        return self._make_room(needed, candidates, int(self._sizes[candidates].sum()))

    def _clean(self) -> bool:
        """Begin to write out what will have to leave."""
        has_begun = False
        for tier, lane in enumerate(self._lanes_out):
            if lane is None and self._goes_on and not self._is_busy(tier, self._lanes_in):
                has_begun |= self._clean_to(tier)
        return has_begun

    def _is_busy(self, tier: int, others: list[tuple[float, int] | None]) -> bool:
        """Whether a tier copies the other way, and has to end that first."""
        return self.problem.tiers[tier].takes_turns and others[tier] is not None

    def _clean_to(self, tier: int) -> bool:
        j = self._to_clean(tier)
        if j is None:
            return False
        self._is_leaving[j] = True
        if not self._is_stored[j]:
            self._is_stored[j] = True
            self._tier[j] = tier
            self._stored[tier] += int(self._sizes[j])
        self._lanes_out[tier] = (self.now + self.problem.tiers[tier].seconds_out(int(self._sizes[j])), j)
        self._note("out", j, tier)
        return True

    def _to_clean(self, tier: int) -> int | None:
        """What goes out next to a tier, if anything should."""
        here = self.step % self._count
        while tier == 1 and self._goes_next:
            j = self._goes_next.popleft()
            if self._absences[j].last < here < self._absences[j].due and self._is_dirty[j] and not self._is_leaving[j]:
                return j
        if not self._is_dirty.any():
            return None
        candidates = self._droppable(self.step)
        profile = self._window.ahead(self.step)
        profile = profile - _until(self._next[candidates] - self.step, self._sizes[candidates], len(profile))
        over = np.flatnonzero(profile > self.problem.limit_bytes)
        is_movable = self._is_inside & self._is_ready & self._is_dirty & ~(self._is_leaving | self._is_locked)
        dirty = np.flatnonzero(is_movable & (self._next > self.step + over[0])) if len(over) else over
        if not len(dirty) and self._boundary:
            dirty = np.flatnonzero(is_movable & self._is_unclean())
        if self._capacity != [NEVER]:
            dirty = dirty[[self._tier_for(j) == tier for j in dirty.tolist()]]
        return int(dirty[np.lexsort((-self._sizes[dirty], -self._next[dirty]))[0]]) if len(dirty) else None

    def _tier_for(self, j: int) -> int | None:
        """Where an object goes: where it was, or is planned to be, or else to the first tier that has room."""
        if self._is_stored[j] or j in self._absences:
            return int(self._tier[j])
        size = int(self._sizes[j])
        return next((tier for tier, used in enumerate(self._stored) if used + size <= self._capacity[tier]), None)

    # Time.

    def _wait(self) -> None:
        """Go on to the next moment at which anything ends."""
        lanes = [lane for lane in (*self._lanes_in, *self._lanes_out) if lane is not None]
        moments = [time for time, _ in lanes] + ([] if self._ends is None else [self._ends])
        if not moments:
            raise StuckError(f"step {self.step} can neither begin nor wait for a copy")
        self.now = min(moments)
        if self._ends is not None and self._ends <= self.now:
            self._end_step()
        self._end_copies(self._lanes_in, self._arrive)
        self._end_copies(self._lanes_out, self._leave)

    def _end_copies(self, lanes: list[tuple[float, int] | None], finish: Callable[[int, int], None]) -> None:
        for tier, lane in enumerate(lanes):
            if lane is not None and lane[0] <= self.now:
                lanes[tier] = None
                finish(lane[1], tier)

    def _arrive(self, j: int, _tier: int) -> None:
        self._is_ready[j] = True

    def _leave(self, j: int, tier: int) -> None:
        self._is_leaving[j] = self._is_dirty[j] = False
        self._note("written", j, tier)
        if j in self._doomed:
            self._doomed.remove(j)
            self._free(j)
            self._forget(j)
        elif j in self._absences and self._absences[j].last < self.step % self._count < self._absences[j].due:
            self._drop(j)

    def _note(self, what: Happening, index: int, tier: int = 0) -> None:
        self.log.append(Event(what, index, tier))


def _until(ends: np.ndarray, sizes: np.ndarray, count: int) -> np.ndarray:
    """For each of so many steps, the sum of sizes that end after it."""
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, np.minimum(ends, count), sizes)
    return np.cumsum(change[::-1])[::-1][1:]


def _by_step(
    problem: Problem, staying: frozenset[int]
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray], list[list[int]]]:
    """For each step, the objects that it uses, those of them whose value it needs, those that it writes, those dead after it.
    What is `staying` outlives the steps."""
    touched: list[list[int]] = [[] for _ in problem.steps]
    olds: list[list[int]] = [[] for _ in problem.steps]
    writes: list[list[int]] = [[] for _ in problem.steps]
    deaths: list[list[int]] = [[] for _ in problem.steps]
    for j, item in enumerate(problem.objects):
        for rank, use in enumerate(item.uses):
            touched[use.step].append(j)
            if rank or item.is_outside:
                olds[use.step].append(j)
            if use.is_written:
                writes[use.step].append(j)
        if item.uses and problem.dies(item) and j not in staying:
            deaths[item.uses[-1].step].append(j)
    arrays = [[np.array(items, np.int64) for items in group] for group in (touched, olds, writes)]
    return arrays[0], arrays[1], arrays[2], deaths
