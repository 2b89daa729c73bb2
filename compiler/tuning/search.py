"""Which configurations are measured, and what of them is believed: an algorithm on names and times alone.

One choice after the other is varied with the others as they are best so far, its options in the same trial as the best one. What
wins at last must win once more, by a margin, against the better of two kernels with the model's own choices: where those two
differ, the machine was too busy to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ...kernels.groups.configuration import TEMPLATE, Choice

MARGIN = 0.03  # of the time, by which a configuration must beat the model's own choices
_STEP = 0.01  # by which one must beat another on the way
_OPTIONS = 12  # of a choice that are measured, in the order in which the model likes them
_ROUNDS = 2  # through all choices: one may depend on a later one

Configuration: TypeAlias = dict[str, str]
Offer = Callable[[Configuration], Sequence[Choice]]  # the choices that there are with a configuration, as it takes them
Measure = Callable[[Sequence[Mapping[str, str]]], Sequence[float | None]]  # us of some in turns; None for what is no kernel


class OutOfTimeError(Exception):
    """There is no time left to look for better configurations."""


@dataclass(frozen=True, slots=True)
class Result:
    """What won: empty for the model's own choices. The times are those of one trial; None where nothing could be measured.

    `tried` are the configurations, as `text_of` writes them, that a search that goes on from here need not measure.
    """

    configuration: Configuration
    time_us: float | None
    own_time_us: float | None
    is_complete: bool
    tried: frozenset[str]


@dataclass
class Search:
    """One search for the best configuration of a problem, from `best` on, without what has been `tried` before.

    `explore` may raise OutOfTimeError, which ends the search; `confirm` does not, and measures longer. A trial takes up to
    `trial_size` configurations.
    """

    offer: Offer
    explore: Measure
    confirm: Measure
    best: Configuration = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    trial_size: int = 8

    def run(self) -> Result:
        is_complete = True
        try:
            for _ in range(_ROUNDS):
                before = self.best
                for name in self._names():
                    self._vary(name)
                if self.best == before:
                    break
        except OutOfTimeError:
            is_complete = False
        return self._confirmed(is_complete)

    def _names(self) -> Iterator[str]:
        """Of the choices, one after the other: another template may bring others."""
        seen: set[str] = set()
        while fresh := [choice.name for choice in self.offer(self.best) if choice.name not in seen]:
            seen.add(fresh[0])
            yield fresh[0]

    def _vary(self, name: str) -> None:
        """Measure the options of a choice beside the best configuration, and keep what is faster."""
        (choice,) = (one for one in self.offer(self.best) if one.name == name)
        others = [option for option in choice.options if option != choice.taken][:_OPTIONS]
        kept = {} if name == TEMPLATE else self.best  # a template has choices of its own
        candidates = [one for option in others if text_of(one := {**kept, name: option}) not in self.tried]
        step = max(self.trial_size - 1, 1)
        for begin in range(0, len(candidates), step):
            trial = [self.best, *candidates[begin : begin + step]]
            reference, *times = self.explore(trial)
            self.tried.update(map(text_of, trial))
            measured = [(time, i) for i, time in enumerate(times, 1) if time is not None]
            if reference is not None and measured and (fastest := min(measured))[0] < reference * (1 - _STEP):
                self.best = trial[fastest[1]]

    def _confirmed(self, is_complete: bool) -> Result:
        first, again, *rest = self.confirm([{}, {}, self.best] if self.best else [{}, {}])
        own = min((time for time in (first, again) if time is not None), default=None)
        if rest and own is not None and rest[0] is not None and rest[0] < own * (1 - MARGIN):
            best = {choice.name: choice.taken for choice in self.offer(self.best)}
            return Result(best, rest[0], own, is_complete, frozenset(self.tried))
        return Result({}, own, own, is_complete, frozenset(self.tried))


def text_of(configuration: Mapping[str, str]) -> str:
    """The configuration in one line, equal for equal ones."""
    return " ".join(f"{name}={option}" for name, option in sorted(configuration.items()))
