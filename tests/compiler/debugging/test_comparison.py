"""Two profiles side by side, and the limits of the machine."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import prefuse
from prefuse.compiler.debugging.comparison import match_steps
from prefuse.compiler.lowering.roofline import measure_limits
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE, named_pipeline, without_fusion
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import Kernel, Launch, Plan, Region
from prefuse.runtime.profile import GroupDescription, Profile, profile_in_turns
from prefuse.runtime.target import Target
from prefuse.tests.compiler.debugging.traced_models import HEAD
from prefuse.tests.kernels.harness import target_of


def profile_of(*groups: tuple[str, ...]) -> Profile:
    """A program with a launch of 1 us for each group of nodes, built around those in capitals."""
    region = Region("x", 0, 4)
    launches = tuple(Launch("k", (region,), (region,), label="+".join(nodes) or f"copy {i}") for i, nodes in enumerate(groups))
    plan = Plan("cpu:avx2,threads=1", (), (), (), (), (Kernel("k", "t", 2, 10, 100),), launches)
    descriptions = {
        step.label: GroupDescription(nodes, computing=tuple(node for node in nodes if node.isupper()))
        for step, nodes in zip(launches, groups, strict=True)
    }
    return Profile("net", plan, descriptions, np.arange(len(groups) + 1)[None] * 1000)


def labels(first: Profile, second: Profile) -> list[tuple[list[str], list[str]]]:
    matches = match_steps(first, second)
    return [([step.label for step in match.first], [step.label for step in match.second]) for match in matches]


def test_steps_are_joined_by_the_nodes_that_they_share() -> None:
    fused = profile_of(("a", "b", "c"), ("d",), ("e", "f"), ())
    plain = profile_of(("a",), ("b",), ("c",), ("d", "e"), ("f",), ("g",))
    assert labels(fused, plain) == [
        (["a+b+c"], ["a", "b", "c"]),
        (["d", "e+f"], ["d+e", "f"]),  # they overlap both ways
        (["copy 3"], []),
        ([], ["g"]),
    ]
    first, second, *_ = match_steps(fused, plain)
    assert (first.time_us, first.bytes_moved) == ((1.0, 3.0), (100, 300))
    assert first.label == "a+b+c"
    assert second.label == "d | e+f"


def test_steps_that_share_only_what_lies_between_them_stay_apart() -> None:
    fused = profile_of(("CONV", "relu"), ("relu", "POOL"), ("relu", "WIDEN", "cat"), ("cat", "LAST"))
    plain = profile_of(("CONV",), ("relu",), ("POOL",), ("WIDEN",), ("cat",), ("LAST",), ("apart",))
    assert labels(fused, plain) == [
        (["CONV+relu"], ["CONV", "relu"]),
        (["relu+POOL"], ["POOL"]),
        (["relu+WIDEN+cat"], ["WIDEN", "cat"]),
        (["cat+LAST"], ["LAST"]),
        ([], ["apart"]),
    ]


def test_layers_of_a_network_that_lies_channels_last_are_compared_one_by_one() -> None:
    weights = "float[32,32,3,3] v, float[32,32,2,2] u, float[16,64,3,3] w"
    text = f"""{HEAD} main (float[1,32,32,32] x, {weights}) => (float[1,16,30,30] y) {{
        first = Conv <pads = [1, 1, 1, 1]> (x, v)
        skip = Relu(first)
        small = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (skip)
        wide = ConvTranspose <strides = [2, 2]> (small, u)
        both = Concat <axis = 1> (skip, wide)
        last = Conv(both, w)
        y = Relu(last)
    }}"""
    model = ir.from_onnx_text(text)
    inputs = {value.name: np.ones(value.shape.numpy(), np.float32) for value in model.graph.inputs if value.name and value.shape}
    nets = [
        prefuse.compile(model.clone(), cache=False, profile=True, pipeline=pipeline, target="cpu:avx2")
        for pipeline in ("default", "no-fusion")
    ]
    first, second = profile_in_turns([net for net in nets if isinstance(net, CompiledModel)], inputs, 1)
    assert any("channels_last" in step.template for step in first.steps)
    matches = match_steps(first, second)
    assert all(match.first and match.second for match in matches)
    assert [sum(bool(step.group.computing) for step in match.first) for match in matches] == [1, 1, 1, 1]


def test_two_pipelines_of_one_model() -> None:
    text = f"""{HEAD} main (float[8,8] x, float[8,8] w) => (float[8,8] y) {{
        p = MatMul(x, w)
        h = Hardmax(p)
        r = Relu(h)
        y = Softmax(r)
    }}"""
    nets = []
    for pipeline in ("canonicalize,decompose,canonicalize,eliminate-dead,fuse-epilogue,plan-memory", "no-fusion"):
        net = prefuse.compile(ir.from_onnx_text(text), cache=False, profile=True, pipeline=pipeline)
        assert isinstance(net, CompiledModel)
        nets.append(net)
    profiles = profile_in_turns(nets, {name: np.eye(8, dtype=np.float32) for name in ("x", "w")}, 7)
    assert [len(profile.stamps_ns) for profile in profiles] == [7, 7]
    matched = {tuple(step.group.nodes for step in match.first): len(match.second) for match in match_steps(*profiles)}
    assert matched == {(("p",),): 1, (("h",), ("h",)): 2, (("r",),): 1, (("y",),): 1}  # what Hardmax became knows what it was


def test_pipelines_with_a_name() -> None:
    assert named_pipeline(None) == named_pipeline("default") == DEFAULT_PIPELINE
    assert named_pipeline("none") == named_pipeline("no-fusion") == without_fusion(DEFAULT_PIPELINE)
    text = "canonicalize,merge-equal,fuse-a{x=1,y=2},merge-b,fold-c,concat-d,choose-e,order-nodes{z=1,w=2}"
    assert without_fusion(text) == "canonicalize,merge-equal,order-nodes{z=1,w=2}"


def test_the_limits_of_this_machine_are_plausible() -> None:
    limits = measure_limits(Target.parse("cpu:avx2", threads=1))
    assert 1e9 < limits.flops_per_second < 1e12
    assert 1e8 < limits.bytes_per_second < 1e12
    assert "1 thread:" in limits.method
    assert (limits.tile_flops_per_second, "tiles" in limits.method) == (0, False)


def test_the_limits_of_gpus_are_assumed() -> None:
    limits = measure_limits(Target.parse("cuda:sm_90"))
    assert "not measured" in limits.method
    assert 5e13 < limits.flops_per_second < 7e13
    assert 9e14 < limits.bfloat16_flops_per_second < 1e15
    assert limits.bytes_per_second == 4.3e12


def test_the_limits_of_tiles_are_plausible() -> None:
    limits = measure_limits(target_of("amx-emulated", threads=1))
    assert limits.tile_flops_per_second > 1e7
    assert "tiles" in limits.method
