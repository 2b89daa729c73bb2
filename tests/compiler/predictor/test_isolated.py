"""A kernel alone, really measured, but no time is held against a clock: near and far launches are there, of the right kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from prefuse.compiler.driver import lower_groups
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.predictor import isolated
from prefuse.compiler.predictor.isolated import IsolatedRun, Timing
from prefuse.compiler.tuning.worker import Worker
from prefuse.kernels.groups.group import Group
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import Launch
from prefuse.runtime.program_file import Program
from prefuse.runtime.target import Target


def group_of(text: str, target: Target) -> Group:
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 21]> main {text}')
    infer_facts(model)
    (item,), _ = lower_groups(model, target)
    return item.group


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("is_serial", [False, True])
def test_a_kernel_is_measured(threads: int, is_serial: bool) -> None:
    target = Target.parse("cpu:avx2", threads)
    group = group_of("(float[70,90] x, float[90,50] w) => (float[70,50] y) { y = MatMul(x, w) }", target)
    found = IsolatedRun(group, target, is_serial, 0.0).answer()
    assert isinstance(found, Timing)
    assert found.near_us > 0
    assert found.far_us > 0


def test_what_is_far_is_read_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each far launch all threads read more than their caches hold, and constants are another copy each time."""
    nets: list[CompiledModel] = []

    def kept(program: Program) -> CompiledModel:
        nets.append(CompiledModel(program))
        return nets[-1]

    monkeypatch.setattr(isolated, "CompiledModel", kept)
    target = Target.parse("cpu:avx2", 2)
    text = "(float[70,90] x) => (float[70,50] y) <float[90,50] w = {" + ",".join(["1"] * 4500) + "}> { y = MatMul(x, w) }"
    assert IsolatedRun(group_of(text, target), target, False, 0.0).answer() is not None
    (net,) = nets
    launches = [step for step in net.plan.steps if isinstance(step, Launch)]
    far = [at for at, step in enumerate(launches) if step.label == "far"]
    near = [step for step in launches if step.label == "near"]
    assert len(near) >= 2
    assert len({step.reads for step in near}) == 1
    assert len(far) == len({launches[at].reads for at in far})
    assert {launches[at - 1].kernel for at in far} == {"sweep"}
    (swept,) = (buffer for buffer in net.plan.buffers if buffer.name == "/swept")
    assert swept.offset is not None
    assert swept.size_bytes >= 4 * target.machine.l2.size_bytes * target.threads
    constants = np.asarray(net.program.constants)
    assert constants[swept.offset : swept.offset + swept.size_bytes].all()  # a page that nobody wrote is no memory


def test_nobody_computes_it() -> None:
    target = Target.parse("cpu:avx2", 1)
    group = group_of("(float[3] x) => (float[3] y) { y = Relu(x) }", target)
    (op,) = group.ops
    unknown = replace(group, ops=(replace(op, op_type="NoSuchOperator"),))
    assert IsolatedRun(unknown, target, False, 0.0).answer() is None


def test_a_process_measures_and_outlives_what_it_cannot_answer() -> None:
    target = Target.parse("cpu:avx2", 1)
    group = group_of("(float[300] x) => (float[300] y) { y = Tanh(x) }", target)
    with Worker() as worker:
        assert worker.ask(IsolatedRun(None, target, False, 0.0)) is None  # type: ignore[arg-type]
        assert isinstance(worker.ask(IsolatedRun(group, target, False, 0.0)), Timing)
