"""How long launches take depends on what was touched since their operands were written."""

from __future__ import annotations

from dataclasses import replace

import onnx
import onnx_ir as ir
import pytest
from prefuse.compiler.driver import lower_groups
from prefuse.compiler.estimates.launches import Distances, faulting_us, predicted_us, reuse_distances, walking_us
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.lowering.planning import LoweredGroup
from prefuse.compiler.lowering.short_programs import without_small_regions
from prefuse.kernels.cost.estimate import Estimate, with_bytes
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import Target

KIND = TensorType((1 << 16,), "float32")
TARGET = Target.parse("cpu:avx2,machine=zen3,threads=1")


def launch(number: int, source: str, result: str, workspace_bytes: int = 0, constant: str = "") -> LoweredGroup:
    """Of one pointwise operator, on an activation alone or with a constant."""
    inputs = (source, constant) if constant else (source,)
    op = Op("Add" if constant else "Relu", inputs, (result,))
    group = Group((op,), inputs, (result,), dict.fromkeys((*inputs, result), KIND), constants=frozenset(inputs[1:]))
    estimate = with_bytes(Estimate(0.0, KIND.elements), group)
    kernel = BuiltKernel("elementwise", None, (), workspace_bytes, estimate=estimate)
    return LoweredGroup(ir.Node("", "Relu", [], name=f"n{number}"), group, kernel, f"k{number}")


def test_distance_is_what_was_touched_since() -> None:
    """Half of what the last to touch it does, all that comes between, and what the launch itself touches, each value once."""
    size, workspace = KIND.size_bytes, 1 << 20
    chain = [launch(0, "x", "a"), launch(1, "a", "b", workspace), launch(2, "b", "c"), launch(3, "b", "d"), launch(4, "a", "e")]
    chain += [launch(5, "e", "f", 4 * workspace)]  # so that a call touches more than any of these
    found = [since.activations for since in reuse_distances(chain)]
    assert found[1] == size / 2 + 2 * size + workspace  # x; a, b
    assert found[2] == (size + workspace) / 2 + 2 * size  # a; b, c
    assert found[3] == size / 2 + 2 * size  # c; b, d
    assert found[4] == workspace / 2 + 3 * size + 2 * size  # b, c, d; a, e


def test_first_launch_finds_what_the_call_before_left() -> None:
    chain = [launch(0, "x", "a"), launch(1, "a", "b", 1 << 20)]
    assert reuse_distances(chain)[0].activations == (KIND.size_bytes + (1 << 20)) / 2 + 2 * KIND.size_bytes  # b; x, a


def test_no_distance_is_more_than_the_memory_of_a_call() -> None:
    """Results take the place of what has been read for the last time."""
    chain = [launch(number, f"v{number}", f"v{number + 1}") for number in range(50)] + [launch(50, "v0", "y", constant="w")]
    for since in reuse_distances(chain):
        assert since.activations <= 4 * KIND.size_bytes  # the constant, and v0 beside an operand and a result
    assert reuse_distances(chain)[-1].constants == 4 * KIND.size_bytes


def test_constants_were_read_by_the_launch_before_that_reads_them() -> None:
    """In this call or in the one before; and no distance is more than the different bytes of a call."""
    size = KIND.size_bytes
    chain = [launch(number, f"v{number}", f"v{number + 1}", constant=name) for number, name in enumerate("wvww")]
    found = [since.constants for since in reuse_distances(chain)]
    most = 4 * size  # two constants, an operand, and a result
    assert found == [3 * size, most, most, 3 * size]  # all of the constant, and half of what both launches touch beside


def test_weights_that_several_launches_read_stay_in_a_cache() -> None:
    """Where what is touched between them has room there, however much the rest of the call touches."""
    far, near = launch(0, "x", "a", 1 << 28), [launch(n, f"{n}", f"{n + 1}", constant="w") for n in (1, 2)]
    first, again = list(predicted_us([far, *near], TARGET).values())[1:]
    assert first - again > KIND.size_bytes * (1 / TARGET.machine.memory_bytes - 1 / TARGET.machine.l3.bytes_per_cycle) / 4e3


def test_far_operands_take_longer() -> None:
    near = [launch(0, "x", "a"), launch(1, "a", "b")]
    far = [launch(0, "x", "a", 1 << 28), launch(1, "a", "b")]
    times = [list(predicted_us(chain, TARGET).values())[1] for chain in (near, far)]
    assert times[1] > 1.5 * times[0]


@pytest.mark.parametrize(("rows", "deals"), [(32, False), (1024, True)])
def test_a_kernel_takes_the_threads_that_it_was_written_for(rows: int, deals: bool) -> None:
    """Products of a short program stay on one thread, which no template knows."""
    text = f"main (float[{rows},64] x, float[64,64] w) => (float[{rows},64] y) {{ y = MatMul(x, w) }}"
    model = import_model(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]>\n{text}'))
    infer_facts(model)
    times: list[float] = []
    for threads in (1, 2):
        target = Target.parse("cpu:avx2,machine=zen3", threads)
        lowered, _ = lower_groups(model, target, "float32")
        times += predicted_us(without_small_regions(lowered), target).values()
    assert (times[1] < times[0]) == deals
    assert (times[1] == times[0]) != deals


def test_pages_of_constants_are_looked_up_where_more_was_touched_than_is_kept() -> None:
    """Alone a launch finds them known; one whose own constants are more looks them up there, too."""
    machine = replace(TARGET.machine, tlb_bytes=1 << 20, page_cycles=70.0)
    target = replace(TARGET, machine=machine)
    estimate, us = Estimate(0.0, 0, constant_bytes=1 << 19), 128 * 70 / machine.ghz / 1e3
    near, far = Distances(1 << 20, 0.0), Distances((1 << 20) + 1, 0.0)
    assert walking_us(estimate, near, target, 1) == 0.0
    assert walking_us(estimate, far, target, 1) == pytest.approx(us)
    assert walking_us(estimate, far, target, 2) == 0.0  # each thread keeps as many
    assert walking_us(replace(estimate, constant_bytes=1 << 21), far, target, 1) == 0.0
    more = estimate.wall_cycles(machine, 1, far.constants) - estimate.wall_cycles(machine, 1, near.constants)
    known = estimate.wall_cycles(TARGET.machine, 1, far.constants) - estimate.wall_cycles(TARGET.machine, 1, near.constants)
    assert more - known == pytest.approx(128 * 70)


def test_large_results_of_the_caller_are_new_pages() -> None:
    target = replace(TARGET, machine=replace(TARGET.machine, fault_cycles=1000.0))
    source, result = ir.Value(name="x"), ir.Value(name="y")
    node = ir.Node("", "Relu", [source], outputs=[result], name="n")
    item = replace(launch(0, "x", "y"), node=node)
    assert faulting_us(item, target) == 0.0
    _graph = ir.Graph([source], [result], nodes=[node])
    assert faulting_us(item, target) == pytest.approx(64 * 1000 / target.machine.ghz / 1e3)
    assert faulting_us(item, TARGET) == 0.0
    assert sum(predicted_us([item], target).values()) > sum(predicted_us([item], TARGET).values())
