"""The search, on a machine that is a table of times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prefuse.compiler.tuning.search import MARGIN, OutOfTimeError, Search, text_of
from prefuse.kernels.groups.configuration import Choice

OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "wide": {"tile": ("6x4", "14x2", "8x3"), "order": ("m n", "n m")},
    "fast": {"tile": ("5x4", "9x2"), "blocks": ("thread", "all")},
}


class Machine:
    """Two templates. Times are products of what each option costs; unnamed ones cost nothing, None is no kernel at all."""

    def __init__(self, costs: Mapping[str, float | None], trials: int = 1000) -> None:
        self.costs, self.trials = costs, trials
        self.measured: list[str] = []

    def offer(self, configuration: Mapping[str, str]) -> list[Choice]:
        template = configuration.get("template", "wide")
        options = {"template": tuple(OPTIONS), **OPTIONS[template]}
        return [Choice(name, some, self._taken(name, some, configuration)) for name, some in options.items()]

    def _taken(self, name: str, options: Sequence[str], configuration: Mapping[str, str]) -> str:
        wanted = configuration.get(name, options[0])
        return wanted if wanted in options else options[0]

    def explore(self, configurations: Sequence[Mapping[str, str]]) -> list[float | None]:
        if self.trials == 0:
            raise OutOfTimeError
        self.trials -= 1
        self.measured += [text_of(one) for one in configurations[1:]]
        return self.times(configurations)

    def times(self, configurations: Sequence[Mapping[str, str]]) -> list[float | None]:
        return [self._time({choice.name: choice.taken for choice in self.offer(one)}) for one in configurations]

    def _time(self, taken: Mapping[str, str]) -> float | None:
        time = 100.0
        for option in taken.values():
            cost = self.costs.get(option, 1.0)
            if cost is None:
                return None
            time *= cost
        return time

    def search(self, start: Mapping[str, str] | None = None, tried: frozenset[str] = frozenset()) -> Search:
        return Search(self.offer, self.explore, self.times, dict(start or {}), set(tried), trial_size=3)


def test_the_best_of_each_choice_wins() -> None:
    result = Machine({"8x3": 0.8, "14x2": 0.9, "n m": 0.9}).search().run()
    assert result.configuration == {"template": "wide", "tile": "8x3", "order": "n m"}
    assert (round(result.time_us or 0), result.own_time_us, result.is_complete) == (72, 100, True)


def test_another_template_brings_its_own_choices() -> None:
    result = Machine({"fast": 0.9, "all": 0.5}).search().run()
    assert result.configuration == {"template": "fast", "tile": "5x4", "blocks": "all"}


def test_own_choices_win_ties() -> None:
    result = Machine({}).search().run()
    assert (result.configuration, result.time_us, result.own_time_us) == ({}, 100, 100)


def test_a_win_within_the_margin_is_none() -> None:
    assert Machine({"8x3": 1 - MARGIN / 2}).search().run().configuration == {}
    assert Machine({"8x3": 1 - 2 * MARGIN}).search().run().configuration["tile"] == "8x3"


def test_a_busy_machine_makes_no_winner() -> None:
    """The same kernel, measured twice, takes 100 and 70: 80 is no gain."""

    class Busy(Machine):
        def times(self, configurations: Sequence[Mapping[str, str]]) -> list[float | None]:
            first, second, *others = super().times(configurations)
            return [first, 70.0 if configurations[1] == {} else second, *others]

    assert Busy({"8x3": 0.8}).search().run().configuration == {}
    assert Busy({"8x3": 0.6}).search().run().configuration["tile"] == "8x3"


def test_what_is_no_kernel_never_wins() -> None:
    assert Machine({"8x3": None, "14x2": 0.9}).search().run().configuration["tile"] == "14x2"
    nothing = Machine({"wide": None}).search().run()
    assert (nothing.configuration, nothing.time_us) == ({}, None)


def test_an_interrupted_search_keeps_what_it_has_and_goes_on_there() -> None:
    costs = {"14x2": 0.9, "8x3": 0.8, "n m": 0.9}
    first = Machine(costs, trials=2)
    begun = first.search().run()
    assert not begun.is_complete
    assert begun.configuration["tile"] == "8x3"
    second = Machine(costs)
    ended = second.search(begun.configuration, begun.tried).run()
    assert ended.is_complete
    assert ended.configuration == Machine(costs).search().run().configuration
    assert not set(second.measured) & begun.tried


def test_every_configuration_is_measured_once() -> None:
    machine = Machine({"8x3": 0.8, "n m": 0.9})
    machine.search().run()
    assert len(machine.measured) == len(set(machine.measured))
