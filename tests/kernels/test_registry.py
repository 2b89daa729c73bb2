"""The table of kinds, the pointwise operators and the templates tell the same story."""

from __future__ import annotations

import pytest
from prefuse.compiler.ir.kinds import KIND_OF_OPERATOR, Kind
from prefuse.kernels.pointwise import POINTWISE
from prefuse.kernels.registry import TEMPLATES


def test_pointwise_kinds_are_the_pointwise_operators() -> None:
    listed = {name for name, kind in KIND_OF_OPERATOR.items() if kind <= Kind.BROADCAST}
    assert listed == POINTWISE.keys() - {"Identity"}  # which is a view


@pytest.mark.parametrize("kind", [Kind.INJECTIVE, Kind.REDUCTION, Kind.OUTPUT_FUSABLE])
def test_every_anchor_has_a_template(kind: Kind) -> None:
    taken = frozenset().union(*(template.anchors for template in TEMPLATES))
    assert {name for name, own in KIND_OF_OPERATOR.items() if own is kind} <= taken


def test_no_operator_is_both_anchor_and_pointwise() -> None:
    assert not frozenset().union(*(template.anchors for template in TEMPLATES)) & POINTWISE.keys()
