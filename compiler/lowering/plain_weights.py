"""Weights that kernels split themselves, where memory is short: the same bits of results from fewer bytes of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...kernels.groups.configuration import TEMPLATE, Configuration
from ...kernels.linalg.matmul_tiles import PLAIN, WEIGHTS
from ...kernels.problem import problem_of
from .planning import LoweredGroup


def with_plain_weights(
    lowered: Sequence[LoweredGroup], configurations: Mapping[str, Configuration]
) -> Mapping[str, Configuration]:
    """The configurations, with weights left as they are wherever kernels have that choice; templates stay the same.

    Groups that pose the same problem share a configuration: they change where all of them have the choice, or none.
    """
    by_problem: dict[str, list[LoweredGroup]] = {}
    for item in lowered:
        by_problem.setdefault(problem_of(item.group), []).append(item)
    found = dict(configurations)
    for problem, items in by_problem.items():
        if all(_has_choice(item) for item in items):
            found[problem] = {**items[0].group.configuration, TEMPLATE: items[0].kernel.template, WEIGHTS: PLAIN}
    return found


def _has_choice(item: LoweredGroup) -> bool:
    return any(choice.name == WEIGHTS and PLAIN in choice.options for choice in item.kernel.choices)
