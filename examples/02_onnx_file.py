"""Compile an ONNX file with named inputs and a dynamic dimension; call it with NumPy arrays."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import prefuse

# Cosine similarity of each query with each of 100 keys.
MODEL = """
<ir_version: 10, opset_import: ["": 20]>
similarity (float[N,32] query, float[100,32] keys) => (float[N,100] scores) <int64[1] last = {-1}> {
  query_norm = ReduceL2(query, last)
  unit_query = Div(query, query_norm)
  key_norm = ReduceL2(keys, last)
  unit_keys = Div(keys, key_norm)
  columns = Transpose <perm = [1, 0]> (unit_keys)
  scores = MatMul(unit_query, columns)
}
"""


def main() -> None:
    """One program for each N, compiled when it first comes; inputs by position or by name."""
    random = np.random.default_rng(0)
    with TemporaryDirectory() as folder:
        path = Path(folder, "similarity.onnx")
        onnx.save(onnx.parser.parse_model(MODEL), path)
        net = prefuse.compile(path)
        keys = random.standard_normal((100, 32), dtype=np.float32)
        for count in (1, 7):
            query = keys[:count] * 3
            scores = net(keys=keys, query=query)
            assert isinstance(scores, np.ndarray)
            print(f"{count} queries: scores {scores.shape}, nearest keys {scores.argmax(axis=1).tolist()}")
            assert scores.argmax(axis=1).tolist() == list(range(count))
        net.save(Path(folder, "similarity.prefuse"))  # the programs of both sizes
        found = prefuse.load(Path(folder, "similarity.prefuse"))(query, keys)
        assert isinstance(found, np.ndarray)
        assert isinstance(scores, np.ndarray)
        assert np.array_equal(found, scores)
        try:
            net(query=query, key=keys)
        except prefuse.CompileError as error:
            print(f"a wrong name is explained: {error}")


if __name__ == "__main__":
    main()
