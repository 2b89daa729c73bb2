"""Compile an ONNX file with named inputs and a dynamic dimension; call it with NumPy arrays."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import prefuse
from onnx import TensorProto, helper


def similarity() -> onnx.ModelProto:
    """Cosine similarity of each query [N, 32] with each of 100 keys: scores [N, 100]."""
    query = helper.make_tensor_value_info("query", TensorProto.FLOAT, ["N", 32])
    keys = helper.make_tensor_value_info("keys", TensorProto.FLOAT, [100, 32])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 100])
    nodes = [
        helper.make_node("LpNormalization", ["query"], ["unit_query"], axis=-1, p=2),
        helper.make_node("LpNormalization", ["keys"], ["unit_keys"], axis=-1, p=2),
        helper.make_node("Transpose", ["unit_keys"], ["columns"], perm=[1, 0]),
        helper.make_node("MatMul", ["unit_query", "columns"], ["scores"]),
    ]
    graph = helper.make_graph(nodes, "similarity", [query, keys], [scores])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def main() -> None:
    """One program for each N, compiled when it first comes; inputs by position or by name."""
    random = np.random.default_rng(0)
    with TemporaryDirectory() as folder:
        path = Path(folder, "similarity.onnx")
        onnx.save(similarity(), path)
        net = prefuse.compile(path)
        keys = random.standard_normal((100, 32), dtype=np.float32)
        for count in (1, 7):
            query = keys[:count] * 3
            scores = net(keys=keys, query=query)
            assert isinstance(scores, np.ndarray)
            print(f"{count} queries: scores {scores.shape}, nearest keys {scores.argmax(axis=1).tolist()}")
            assert scores.argmax(axis=1).tolist() == list(range(count))
        try:
            net(query=query, key=keys)
        except prefuse.CompileError as error:
            print(f"a wrong name is explained: {error}")


if __name__ == "__main__":
    main()
