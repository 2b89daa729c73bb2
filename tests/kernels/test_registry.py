"""The table of kinds, the pointwise operators and the templates tell the same story."""

from __future__ import annotations

from typing import Any

import pytest
from prefuse.compiler.ir.kinds import KIND_OF_OPERATOR, Kind
from prefuse.kernels.codegen.builder import KernelBuilder
from prefuse.kernels.expressions.pointwise import POINTWISE
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.registry import TEMPLATES, build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import Target


def test_pointwise_kinds_are_the_pointwise_operators() -> None:
    listed = {name for name, kind in KIND_OF_OPERATOR.items() if kind <= Kind.BROADCAST}
    assert listed == POINTWISE.keys() - {"Identity"}  # which is a view


@pytest.mark.parametrize("kind", [Kind.INJECTIVE, Kind.REDUCTION, Kind.OUTPUT_FUSABLE])
def test_every_anchor_has_a_template(kind: Kind) -> None:
    taken = frozenset().union(*(template.anchors for template in TEMPLATES))
    assert {name for name, own in KIND_OF_OPERATOR.items() if own is kind} <= taken


def test_no_operator_is_both_anchor_and_pointwise() -> None:
    assert not frozenset().union(*(template.anchors for template in TEMPLATES)) & POINTWISE.keys()


@pytest.mark.parametrize("target", [Target("cpu", "avx2", 1), Target("cuda", "sm_90")], ids=str)
def test_templates_that_know_no_surroundings_see_none(target: Target) -> None:
    """A transpose before a product, and one after it: the product's template would read and store at the wrong places."""
    kind = TensorType((3, 3), "float32")
    before = (Op("Transpose", ("a",), ("t",)), Op("MatMul", ("t", "b"), ("y",)))
    after = (Op("MatMul", ("a", "b"), ("t",)), Op("Transpose", ("t",), ("y",)))
    for ops in (before, after):
        refused = build_kernel(Group(ops, ("a", "b"), ("y",), dict.fromkeys("abty", kind)), target)
        assert isinstance(refused, tuple)
        assert ("matmul", "computes one operator, and reads its operands through no others") in refused


def test_a_product_whose_result_is_returned_beside_its_follower_has_one_kernel() -> None:
    types = {name: TensorType((8, 8), "float32") for name in ("x", "w", "h", "y")}
    ops = (Op("MatMul", ("x", "w"), ("h",), {}, 23), Op("Relu", ("h",), ("y",), {}, 23))
    built = build_kernel(Group(ops, ("x", "w"), ("h", "y"), types, frozenset(["w"])), Target.parse("cpu"))
    assert isinstance(built, BuiltKernel)
    assert built.template == "matmul"


def test_scratch_beyond_32_bit_indices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No group of so few elements needs so much: the kernel is made to ask for it."""
    kind, ask = TensorType((8, 8), "float32"), KernelBuilder.function

    def function(builder: KernelBuilder, **how: Any) -> Any:
        builder.workspace(2**31, "uint8")
        return ask(builder, **how)

    monkeypatch.setattr(KernelBuilder, "function", function)
    refused = build_kernel(Group((Op("Relu", ("x",), ("y",)),), ("x",), ("y",), {"x": kind, "y": kind}), Target.parse("cpu"))
    assert isinstance(refused, tuple)
    assert any("32-bit indices" in reason for _, reason in refused)
