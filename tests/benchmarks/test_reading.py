"""benchmarks/reading.py: which bytes a step reads, and what is a floor."""

from __future__ import annotations

import numpy as np
import onnx
import prefuse
import pytest
from onnx import helper, numpy_helper
from prefuse.benchmarks.reading import _covered, floor_of, is_product, readers, text_block, weights_read
from prefuse.kernels.linalg import dequantized_matmul, dequantized_rows, fixed_point_matmul, fixed_point_tiles  # noqa: F401
from prefuse.kernels.linalg.stored_weights import WeightsKernel
from prefuse.runtime.executor import CompiledModel


def product(weights: str | None, k: int = 256, columns: int = 512) -> CompiledModel:
    """A row by a matrix, and rows of a table that is not read whole."""
    random = np.random.default_rng(0)
    arrays = {"w": random.standard_normal((k, columns), np.float32), "t": random.standard_normal((5000, k), np.float32)}
    nodes = [helper.make_node("Gather", ["t", "i"], ["x"]), helper.make_node("MatMul", ["x", "w"], ["y"])]
    given = helper.make_tensor_value_info("i", onnx.TensorProto.INT64, (1,))
    result = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (1, columns))
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "main", [given], [result], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    net = prefuse.compile(model, target="cpu:avx2", threads=1, cache=False, weights=weights)
    assert isinstance(net, CompiledModel)
    return net


@pytest.mark.parametrize(("weights", "size_bytes"), [(None, 4 * 256 * 512), ("int8", 256 * 512 + 4 * 512), ("int4", None)])
def test_weights_are_counted_with_their_scales_as_the_program_has_them(weights: str | None, size_bytes: int | None) -> None:
    """int8: a float32 scale a column. int4: as many float32 scales as there are blocks, not of half the bytes."""
    read = weights_read(product(weights).plan)
    if size_bytes is not None:
        assert size_bytes <= read <= 1.1 * size_bytes  # with what fills up the last panel of columns
    else:
        blocks = (read - 256 * 512 // 2) / 4 / 512
        assert blocks == int(blocks) > 0


def test_bytes_count_once() -> None:
    assert _covered([(0, 10), (5, 20), (30, 40), (32, 35)]) == 30


def test_readers_read_all_bytes() -> None:
    """The largest number that is anywhere in them is found by those that look for it; the product adds all of them up."""
    found = readers(1 << 20, threads=2)
    results = {name: np.asarray(call()) for name, call in found.items()}
    assert results.pop("a product of one row").tolist() == [[1024.0] * 256]
    assert len(results) == 3
    assert all(result.tolist() == [1.0, 1.0] for result in results.values())


def test_the_fastest_reader_is_the_floor_and_a_step_that_is_faster_says_so() -> None:
    times = {"step": [[0.010, 0.011], [0.020]], "one": [[0.012], [0.024]], "two": [[0.008], [0.016]], "peer": [[1.0], [1.0]]}
    found = floor_of(times, 80_000_000, ("one", "two"))
    assert found.reader == "two"
    assert found.floor_ms == pytest.approx(12)
    assert found.share.median == pytest.approx((8 / 10.5 + 0.8) / 2)
    assert found.fault == ""
    alone = floor_of(times, 80_000_000, ("one",))
    assert "the floor is slower than the step" in alone.fault


def test_texts_go_back_before_each_turn() -> None:
    """So that each step is at the place it was at in all turns, and none of them reads a prompt."""
    made: list[str] = []
    block = text_block(lambda: made.append("back"), lambda: made.append("step"), 4)
    assert len(block()) == 3
    assert made == ["back", *["step"] * 4]


def test_products_of_stored_weights_are_products() -> None:
    """All their templates: those by AMX tiles were none, and a step of eight texts read 0 bytes."""
    templates = {kernel.template for kernel in WeightsKernel.__subclasses__()}
    assert len(templates) >= 4
    assert all(is_product(template) for template in templates)
    assert not is_product("attention")
