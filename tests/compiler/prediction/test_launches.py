"""How long launches take depends on what was touched since their operands were written."""

from __future__ import annotations

import onnx_ir as ir
from prefuse.compiler.lowering.planning import LoweredGroup
from prefuse.compiler.prediction.launches import predicted_us, reuse_distances
from prefuse.kernels.cost.estimate import Estimate, with_bytes
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import Target

KIND = TensorType((1 << 16,), "float32")
TARGET = Target.parse("cpu:avx2,machine=zen3,threads=1")


def launch(number: int, source: str, result: str, workspace_bytes: int = 0) -> LoweredGroup:
    """Of one pointwise operator."""
    group = Group((Op("Relu", (source,), (result,)),), (source,), (result,), {source: KIND, result: KIND})
    estimate = with_bytes(Estimate(0.0, KIND.elements), group)
    kernel = BuiltKernel("elementwise", None, (), workspace_bytes, estimate=estimate)
    return LoweredGroup(ir.Node("", "Relu", [], name=f"n{number}"), group, kernel, f"k{number}")


def test_distance_is_what_was_touched_since() -> None:
    """Half of what the writer touches, all that comes between, and what the launch itself touches."""
    moved = 2 * KIND.size_bytes
    chain = [launch(0, "x", "a"), launch(1, "a", "b", 1 << 20), launch(2, "b", "c"), launch(3, "a", "d")]
    found = reuse_distances(chain)
    assert found[1] == moved / 2 + moved + (1 << 20)
    assert found[2] == (moved + (1 << 20)) / 2 + moved
    assert found[3] == moved / 2 + (moved + (1 << 20)) + moved + moved


def test_first_launch_finds_what_the_call_before_left() -> None:
    chain = [launch(0, "x", "a"), launch(1, "a", "b", 1 << 20)]
    assert reuse_distances(chain)[0] == 2 * (2 * KIND.size_bytes) + (1 << 20) + 2 * KIND.size_bytes


def test_far_operands_take_longer() -> None:
    near = [launch(0, "x", "a"), launch(1, "a", "b")]
    far = [launch(0, "x", "a", 1 << 28), launch(1, "a", "b")]
    times = [list(predicted_us(chain, TARGET).values())[1] for chain in (near, far)]
    assert times[1] > 1.5 * times[0]
