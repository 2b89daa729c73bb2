"""Tunable choices of a template: register tile, order of loops, and so on.

A template asks its builder: `tile = builder.choose("tile", options)`. The options are all that is legal, by name, the one that
its model of the machine likes best first. A configuration names some of them; what it names that is not legal is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Configuration: TypeAlias = Mapping[str, str]  # of names of choices to names of options
TEMPLATE = "template"  # the choice among the templates that take a group
# Attribute of an operator: the template that computes its group, whatever is cheaper, for the sake of equal bits.
KEPT_TEMPLATE = "prefuse.template"


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision that was made: `taken` is one of `options`, whose first is the model's own."""

    name: str
    options: tuple[str, ...]
    taken: str


def ignored(configuration: Configuration, choices: tuple[Choice, ...]) -> tuple[str, ...]:
    """For each choice that a configuration names in vain: why it was ignored."""
    made = {choice.name: choice for choice in choices}
    return tuple(
        f"{name}={wanted} ignored: "
        + (f"not one of {', '.join(made[name].options)}" if name in made else "there is no such choice here")
        for name, wanted in sorted(configuration.items())
        if name not in made or made[name].taken != wanted
    )
