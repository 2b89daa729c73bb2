"""NonMaxSuppression at its largest size: by hand in float32, and ONNX Runtime's choices for boxes on the threshold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from prefuse.kernels.registry import build_kernel
from prefuse.runtime.target import Target

from ..harness import LEVELS, check, check_in_turn, run, target_of
from .bounded import BoundedCase, bounded, padded

rng = np.random.default_rng(13)


def onnx_runtime(inputs: Sequence[np.ndarray | None], center_point_box: int) -> np.ndarray:
    """What ONNX Runtime selects."""
    names = ["" if array is None else f"x{i}" for i, array in enumerate(inputs)]
    node = onnx.helper.make_node("NonMaxSuppression", names, ["y"], center_point_box=center_point_box)
    given = {name: array for name, array in zip(names, inputs, strict=True) if array is not None}
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in given.items()
    ]
    graph = onnx.helper.make_graph([node], "one", values, [onnx.helper.make_empty_tensor_value_info("y")])
    graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT64, (None, 3)))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, given)[0])


def suppression(
    boxes: np.ndarray,
    scores: np.ndarray,
    limit: int | None,
    iou: float | None = 0.5,
    score: float | None = None,
    *,
    center: bool = False,
    room: int | None = None,
    constants: Sequence[int] = (),
    expected: np.ndarray | None = None,
) -> BoundedCase:
    """A case with the result of ONNX Runtime; `room` bounds what is selected of a class, all boxes if not given."""
    scalars = [
        None if value is None else np.array([value], dtype)
        for value, dtype in ((limit, np.int64), (iou, np.float32), (score, np.float32))
    ]
    inputs = [boxes.astype(np.float32), scores.astype(np.float32), *scalars]
    found = onnx_runtime(inputs, int(center)) if expected is None else expected
    most = scores.shape[0] * scores.shape[1] * (boxes.shape[1] if room is None else room)
    return bounded(
        "NonMaxSuppression", inputs, [((most, 3), 0)], [found], constants=constants, attributes={"center_point_box": int(center)}
    )


def scattered(batches: int, boxes: int) -> np.ndarray:
    """Boxes by any two opposite corners, many of them overlapping."""
    return rng.random((batches, boxes, 4)) * 3


def on_a_grid(batches: int, boxes: int) -> np.ndarray:
    """Boxes of small whole sizes, so that many overlap by simple fractions."""
    corner = rng.integers(0, 3, (batches, boxes, 2))
    return np.concatenate([corner, corner + rng.integers(0, 4, (batches, boxes, 2))], axis=2)


def ties(*shape: int) -> np.ndarray:
    return rng.integers(0, 5, shape) / 4


def suppressions() -> list[BoundedCase]:
    boxes, scores = scattered(2, 37), rng.random((2, 3, 37))
    cases = [
        suppression(boxes, scores, 37),
        suppression(boxes, scores, 5, 0.1, 0.4),
        suppression(boxes, scores, 5, room=5, constants=(2, 3)),
        suppression(boxes, scores, 1000, 0.0),
        suppression(boxes, scores, 1000, 1.0),
        suppression(boxes, scores, 0),
        suppression(boxes, scores, -3),
        suppression(boxes, scores, 9, 0.5, 2.0),
        suppression(boxes, scores, None, expected=np.empty((0, 3), np.int64)),
        suppression(boxes[:, :, :] - 1.5, scores - 0.5, 37, 0.3, -0.2, center=True),
        suppression(scattered(1, 1), ties(1, 1, 1), 1),
        suppression(np.zeros((1, 9, 4)), ties(1, 2, 9), 9),  # boxes without area overlap nothing
        suppression(np.ones((1, 9, 1)) * [0, 0, 1, 1], ties(1, 2, 9), 9),
        suppression(scattered(2, 600), ties(2, 2, 600), 600, 0.2),  # dealt to threads
    ]
    cases += [suppression(on_a_grid(2, 60), ties(2, 2, 60), 60, iou, 0.0) for iou in (0.25, 1 / 3, 0.5)]
    return [*cases, suppression(on_a_grid(2, 60), ties(2, 2, 60), 60, 1 / 3, 0.25, center=True)]


@pytest.mark.parametrize("level", LEVELS)
def test_suppression(level: str) -> None:
    check_in_turn(suppressions(), level)


def test_special_numbers() -> None:
    """A score that is no number is above no threshold; infinite scores are scores; absent thresholds suppress any overlap."""
    boxes = np.array([[[0, 0, 1, 1], [5, 5, 6, 6], [0, 0, 1, 2], [9, 9, 10, 10], [20, 20, 21, 21]]])
    scores = np.array([[[-np.inf, np.nan, np.inf, 0.0, -0.0]]])
    every = np.array([[0, 0, 2], [0, 0, 3], [0, 0, 4]])
    cases = [
        suppression(boxes, scores, 9, None, expected=every),
        suppression(boxes, scores, 9, 0.9, expected=np.array([[0, 0, 2], [0, 0, 3], [0, 0, 4], [0, 0, 0]])),
        suppression(boxes, scores, 9, 0.9, -1.0, expected=every),
        suppression(np.full((1, 5, 4), np.nan), scores, 9, 0.5, 0.0, expected=np.array([[0, 0, 2]])),
    ]
    check(cases, target_of("avx2"))


def test_zeros_behind_what_is_found() -> None:
    boxes, scores = scattered(2, 37), rng.random((2, 3, 37))
    check([padded(suppression(boxes, scores, limit, 0.2)) for limit in (0, 5)], target_of("avx2"))


def test_results_are_the_same_in_every_run() -> None:
    boxes, scores = scattered(2, 300), ties(2, 2, 300)
    one, other = suppression(boxes, scores, 300), suppression(boxes, scores, 300)
    run([one, other], target_of("avx2"))
    assert [got.tobytes() for got in one.got] == [got.tobytes() for got in other.got]


def test_a_gpu_is_refused() -> None:
    case = suppression(scattered(1, 9), ties(1, 1, 9), 9)
    refused = (("suppression", "it takes candidates from a heap on the CPU only"),)
    assert build_kernel(case.group, Target.parse("cuda:sm_90")) == refused
