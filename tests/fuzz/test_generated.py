"""Other generated models each day; `python -m tests.fuzz` runs thousands."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

from ..sample import sample_number
from ..worker_pool import Lost, run_apart
from .generated import Generated, generated_model, generated_models
from .oracle import Slice, difference, judge_generated

_MODELS = 24


def test_generated_models_compute_what_the_references_do() -> None:
    samples = [sample for sample in generated_models(_MODELS, sample_number()) if isinstance(sample, Generated)]
    done = list(run_apart(samples, judge_generated, processes=2, timeout_s=30, memory_bytes=6 << 30))
    faults = [
        f"{one.task.name}: {one.result}" for one in done if isinstance(one.result, Lost) or one.result.outcome != "accepted"
    ]
    assert len(done) == _MODELS
    assert not faults


def test_a_model_is_made_again_from_its_number() -> None:
    for number in range(20):
        (first, feeds), (second, again) = generated_model(3, number), generated_model(3, number)
        assert first.SerializeToString() == second.SerializeToString()
        assert list(feeds) == list(again)
        assert all(feeds[name].tobytes() == again[name].tobytes() for name in feeds)


def test_many_operators_are_generated() -> None:
    models = [generated_model(0, number)[0] for number in range(400)]
    operators = Counter(node.op_type for model in models for node in model.graph.node)
    opsets = {model.opset_import[0].version for model in models}
    assert len(operators) > 100
    assert {"If", "Loop", "Scan", "SequenceConstruct", "NonZero", "Unique", "LSTM", "QLinearConv", "Resize"} <= set(operators)
    assert opsets >= set(range(13, 24))


@pytest.mark.parametrize(
    ("found", "expected", "differs"),
    [
        (np.array([1, np.nan], np.float32), np.array([1, np.nan], np.float32), False),
        (np.array([1, np.nan], np.float32), np.array([1, 0], np.float32), True),
        (np.array([np.inf], np.float32), np.array([-np.inf], np.float32), True),
        (np.array([1], np.float32), np.array([1.001], np.float32), True),
        (np.array([1], np.float32), np.array([1], np.float64), True),
        (np.array([1], np.float32), np.array([[1]], np.float32), True),
        (np.array([1, 2], np.int64), np.array([1, 3], np.int64), True),
        (np.array([1], np.float16), np.array([1.001], np.float16), False),
        ([np.array([1], np.int64)], [np.array([1], np.int64)], False),
        ([np.array([1], np.int64)], [np.array([1], np.int64), np.array([1], np.int64)], True),
        (np.array([1], np.int64), [np.array([1], np.int64)], True),
    ],
)
def test_differences_are_told(found: object, expected: object, differs: bool) -> None:
    assert bool(difference(found, expected)) == differs


@pytest.mark.parametrize(
    ("start", "end", "step", "places"),
    [(-9, -(2**63), -1, [0]), (2, 2**63 - 1, -1, []), (9, -9, -2, [3, 1]), (-3, 2**63 - 1, 2, [1, 3]), (2, 1, 1, [])],
)
def test_slices_are_judged_by_the_text(start: int, end: int, step: int, places: list[int]) -> None:
    bounds = ", ".join(f"int64[1] {name} = {{{value}}}" for name, value in (("s", start), ("e", end), ("a", 0), ("d", step)))
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> main (float[4] x) => (float[N] y) <{bounds}> {{ y = Slice(x, s, e, a, d) }}'
    )
    (found,) = ReferenceEvaluator(model, new_ops=[Slice]).run(None, {"x": np.arange(4, dtype=np.float32)})
    assert list(found) == places


def test_a_wrong_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parser.parse_model('<ir_version: 8, opset_import: ["": 18]> main (float[2] x) => (float[2] y) { y = Neg(x) }')
    monkeypatch.setattr(Generated, "built", lambda self: (model, {"x": np.array([1, 2], np.float32)}))
    monkeypatch.setattr("prefuse.compile", lambda *args, **kwargs: lambda x: x)
    verdict = judge_generated(Generated("one", lambda folder: folder))
    assert verdict.outcome == "wrong"
    assert "onnxruntime and onnx.reference" in verdict.detail
