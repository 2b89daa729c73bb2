"""What a generated model is made of: each recipe adds an operator, or a few that belong together, to a draft."""

from __future__ import annotations

from collections.abc import Callable

from ..draft import Draft
from . import blocks, contrib, control, elements, indices, networks, old, rare, shapes, windows

RECIPES: list[Callable[[Draft], object]] = [
    recipe
    for family in (elements, shapes, indices, networks, windows, control, blocks, contrib, old, rare)
    for recipe in family.RECIPES
]
