"""Programs with counters: what a profile says, the trace, and what cannot be profiled."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.runtime.errors import InputError, OptionError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import Copy, Kernel, Launch, Plan, Region
from prefuse.runtime.profile import GroupDescription, Limits, Profile, Recorder, descriptions_of, profile_in_turns
from prefuse.runtime.program_file import Program

HEAD = '<ir_version: 10, opset_import: ["": 21]>'
TEXT = f"""{HEAD} main (float[64,64] x, float[64,64] w) => (float[64,64] y, float[64,64] z) {{
    product = MatMul(x, w)
    y = Relu(product)
    z = Softmax(y)
}}"""
PIPELINE = "canonicalize,fuse-epilogue,plan-memory"


def compiled(text: str, target: str = "cpu:avx2", **options: Any) -> CompiledModel:
    net = prefuse.compile(ir.from_onnx_text(text), cache=False, target=target, **options)
    assert isinstance(net, CompiledModel)
    return net


@pytest.fixture(scope="module")
def net() -> CompiledModel:
    return compiled(TEXT, profile=True, pipeline=PIPELINE, name="two")


def test_a_profile_has_every_step(net: CompiledModel, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    for one in (net, _loaded(net, tmp_path)):
        profile = one.profile(x, w=x, runs=3)
        assert profile.stamps_ns.shape == (3, 3)
        assert (np.diff(profile.stamps_ns) > 0).all()
        assert (profile.stamps_ns[1:, 0] >= profile.stamps_ns[:-1, -1]).all()  # one call after the other, on one clock
        product, softmax = profile.steps
        inexact = "its errors grow with the largest element of a block, which precision float32 does not allow"
        assert ("strassen_matmul", inexact) in product.group.refused
        assert (product.group.nodes, product.group.source, product.group.computing) == (
            ("product", "y"),
            "product, y",
            ("product",),
        )
        assert product.group.predicted_us > 0
        assert profile.predicted_us == product.group.predicted_us + softmax.group.predicted_us
        assert softmax.group.alone == ("nothing beside it to fuse: it reads MatMul",)
        assert (product.template, product.flops, product.bytes_moved) == ("matmul", 2 * 64**3, 3 * 64 * 64 * 4)
        assert product.share + softmax.share == pytest.approx(1)
        assert profile.time_us >= max(product.time_us, softmax.time_us)
    np.testing.assert_array_equal(net(x, x)[0], compiled(TEXT, pipeline=PIPELINE)(x, x)[0])  # type: ignore[index]


def _loaded(net: CompiledModel, folder: Path) -> CompiledModel:
    net.save(folder / "net.prefuse")
    loaded = prefuse.load(folder / "net.prefuse")
    assert isinstance(loaded, CompiledModel)
    return loaded


def test_counters_are_code_of_profiled_programs_only(net: CompiledModel) -> None:
    plain = compiled(TEXT, pipeline=PIPELINE)
    assert b"prefuse_profile" in net.program.library
    assert b"prefuse_profile" not in plain.program.library
    assert "groups" not in plain.program.manifest
    x = np.zeros((64, 64), np.float32)
    with pytest.raises(OptionError, match="no counters; compile the model with profile=True"):
        plain.profile(x, x)
    with pytest.raises(OptionError, match="0 calls"):
        net.profile(x, x, runs=0)


def test_a_long_program_is_stamped_across_its_functions() -> None:
    steps = " ".join(f"v{i + 1} = Softmax(v{i})" for i in range(300))
    text = f"{HEAD} main (float[2,8] v0) => (float[2,8] v300) {{ {steps} }}"
    net = compiled(text, profile=True, pipeline=PIPELINE)
    profile = net.profile(np.zeros((2, 8), np.float32), runs=2)
    assert profile.stamps_ns.shape == (2, 301)
    assert (np.diff(profile.stamps_ns) >= 0).all()  # a counter may tick more slowly than the smallest step takes
    assert (profile.stamps_ns[:, -1] > profile.stamps_ns[:, 0]).all()


def test_the_call_of_a_specialised_model_is_profiled() -> None:
    net = prefuse.compile(ir.from_onnx_text(f"{HEAD} main (float[N,8] x) => (float[N,8] y) {{ y = Softmax(x) }}"), profile=True)
    assert isinstance(net, SpecializedModel)
    profile = net.profile(np.zeros((3, 8), np.float32), runs=2)
    assert [step.label for step in profile.steps] == ["y"]
    assert profile.plan is net.plan


def test_what_cannot_be_profiled() -> None:
    with pytest.raises(OptionError, match="profile: 3 is neither True nor False"):
        compiled(TEXT, profile=3)
    body = "<body = b (int64 i, bool c, float[4] a) => (bool d, float[4] e) { d = Identity(c) e = Neg(a) }>"
    text = f"{HEAD} main (float[4] x, int64 n, bool go) => (float[4] y) {{ y = Loop(n, go, x) {body} }}"
    staged = prefuse.compile(ir.from_onnx_text(text), profile=True)
    with pytest.raises(OptionError, match="the model runs in stages"):
        staged.profile(np.zeros(4, np.float32), 1, True)


def test_a_manifest_that_somebody_wrote(net: CompiledModel) -> None:
    """What a file says of its groups is shown, and decides nothing."""
    program = net.program
    wrong = {"nodes": 7, "refused": [["x"], "yy", ["gather", "no"]], "source": 1, "predicted_us": "soon"}
    for groups in (None, 3, {"a": 4}, {"a": wrong}, {"a": {**wrong, "predicted_us": -1.0}}):
        found = descriptions_of(Program(program.plan, b"", program.constants, {"groups": groups}))
        assert found in ({}, {"a": GroupDescription()}, {"a": GroupDescription((), "1", (("gather", "no"),))})


# ------------------------------------------------------------------------------------------------- made-up times


def made_up() -> Profile:
    """A launch and a copy: 10 and 30 us in the first call, 20 and 40 us in the second, 60 us later."""
    region = Region("x", 0, 400)
    launch = Launch("k", (region,), (Region("h", 0, 400),), label="a+b at net.py:7")
    plan = Plan(
        "cpu:avx2,threads=1", (), (), (), (), (Kernel("k", "matmul", 2, 5000, 800),), (launch, Copy(region, Region("y", 0, 400)))
    )
    stamps = np.array([[0, 10_000, 40_000], [100_000, 120_000, 160_000]], np.int64) + 10**12
    groups = {launch.label: GroupDescription(("a", "b"), "net.py:7", (("attention", "no scores"),))}
    return Profile("net", plan, groups, stamps, Limits(1e9, 0.1e9, "made up"))


def test_rates_and_the_roofline() -> None:
    profile = made_up()
    launch, copy = profile.steps
    assert (profile.time_us, profile.bytes_moved) == (50.0, 1600)
    assert (launch.time_us, copy.time_us) == (15.0, 35.0)
    assert launch.share == pytest.approx(0.3)
    assert launch.flops_per_second == pytest.approx(5000 / 15e-6)
    assert copy.bytes_per_second == pytest.approx(800 / 35e-6)
    assert profile.limits is not None
    assert launch.roofline(profile.limits) == pytest.approx(8.0 / 15)  # 5 us of arithmetic, 8 us of memory
    assert (copy.label, copy.template, copy.flops) == ("copy to y", "copy", 0)
    data = json.loads(json.dumps(profile.as_json()))
    assert data["steps"][0]["roofline"] == pytest.approx(8.0 / 15)
    assert data["steps"][0]["group"]["refused"] == [["attention", "no scores"]]
    assert data["limits"]["method"] == "made up"


def test_products_of_pairs_have_a_limit_of_their_own() -> None:
    limits = Limits(1e9, 1e9, bfloat16_flops_per_second=2e9)
    assert (limits.seconds(4000, 1000), limits.seconds(4000, 1000, "bfloat16")) == (4e-6, 2e-6)
    assert limits.joined(Limits(1e9, 1e9, bfloat16_flops_per_second=3e9)).bfloat16_flops_per_second == 3e9
    assert Limits(1e9, 1e9).seconds(4000, 1000, "bfloat16") == 4e-6
    step = replace(made_up().steps[0], multiplies="bfloat16", flops=60_000)
    assert step.roofline(limits) == pytest.approx(30 / 15)


def test_products_of_tiles_have_a_limit_of_their_own() -> None:
    """A product of two terms is three products of tiles, so that the limit of useful ones is a third."""
    limits = Limits(1e9, 1e9, bfloat16_flops_per_second=2e9, tile_flops_per_second=12e9)
    seconds = [limits.seconds(24000, 1000, multiplies) for multiplies in ("float32", "bfloat16", "tiles1", "tiles3", "tiles6")]
    assert seconds == pytest.approx([24e-6, 12e-6, 2e-6, 6e-6, 12e-6])
    assert limits.joined(Limits(1e9, 1e9, tile_flops_per_second=15e9)).tile_flops_per_second == 15e9


def test_limits_of_two_moments() -> None:
    """The higher ones count; a machine that lost half of its speed between them is told."""
    before, after = Limits(490e9, 30e9, "how"), Limits(250e9, 31e9, "how")
    assert before.joined(after) == Limits(490e9, 31e9, "how", 1 - 250 / 490)
    assert before.joined(after).has_changed
    assert after.joined(before).has_changed
    assert not before.joined(Limits(500e9, 29e9)).has_changed
    assert Limits(1e9, 20e9).joined(Limits(1e9, 30e9)).change == pytest.approx(1 / 3)
    assert before.joined(after).joined(before).has_changed


def test_the_trace_has_an_event_a_step(tmp_path: Path) -> None:
    made_up().write_trace(tmp_path / "trace.json")
    events = [one for one in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if one["ph"] == "X"]
    assert [(one["ts"], one["dur"]) for one in events] == [(0, 10), (10, 30), (100, 20), (120, 40)]
    wanted = {"source": "net.py:7", "nodes": ["a", "b"], "template": "matmul", "flops": 5000, "bytes": 800}
    assert events[0]["args"] == wanted
    assert (events[0]["name"], events[0]["cat"]) == ("a+b at net.py:7", "matmul")
    with pytest.raises(OptionError, match="cannot be written"):
        made_up().write_trace(tmp_path / "absent" / "trace.json")


def test_counters_become_nanoseconds_at_their_own_rate() -> None:
    class Counting:
        """An executable whose counter runs at 2 ticks a nanosecond."""

        def bind_profile(self, arena: object, states: object) -> Counting:
            return self

        def __call__(self, *addresses: int) -> None:
            row = (ctypes.c_int64 * 5).from_address(addresses[-1])
            begin = self.calls * 1_000_000
            row[:] = [7, begin, 500 + 2 * begin, 500 + 2 * begin + 3000, 500 + 2 * begin + 8000]
            self.calls += 1

        calls = 0

    recorder = Recorder(Counting(), 3, 2)  # type: ignore[arg-type]
    call = recorder.bind(None)  # type: ignore[arg-type]
    for _ in range(3):
        call()
    begin = 7 * 10**9 + np.array([0, 1_000_000, 2_000_000])
    np.testing.assert_array_equal(recorder.stamps_ns(), begin[:, None] + np.array([0, 1500, 4000]))


def test_an_input_may_have_the_name_of_an_argument() -> None:
    net = compiled(f"{HEAD} main (float[8] runs, float[8] x) => (float[8] y) {{ y = Sub(x, runs) }}", profile=True)
    inputs = {"x": np.ones(8, np.float32), "runs": np.zeros(8, np.float32)}
    (profile,) = profile_in_turns([net], inputs, 3)
    assert len(profile.stamps_ns) == 3
    with pytest.raises(InputError, match="x not given"):
        profile_in_turns([net], {"runs": inputs["runs"]}, 3)
