"""Sound files with some bytes changed, cut off or repeated; the same at every run for one seed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import prefuse
from onnx import parser

from .judge import Sample

_MODELS = {
    "network": """<ir_version: 8, opset_import: ["": 18]>
main (float[1,3,8,8] x) => (float[1,5] y) <float[4,3,3,3] w = {WEIGHTS}, float[4] b = {1,2,3,4}, float[4,5] h = {HEAD}> {
    c = Conv<pads=[1,1,1,1], strides=[2,2]>(x, w, b)
    r = Relu(c)
    g = GlobalAveragePool(r)
    f = Flatten(g)
    m = MatMul(f, h)
    y = Softmax<axis=-1>(m)
}""".replace("WEIGHTS", ",".join(str(i % 7 / 10) for i in range(108))).replace("HEAD", ",".join(str(i / 20) for i in range(20))),
    "indices": """<ir_version: 8, opset_import: ["": 18]>
main (float[6,4] x, int64[3] i) => (float[3,8] y, int64[3,2] k) <int64[1] two = {2}, int64[2] shape = {3, -1}> {
    g = Gather(x, i)
    c = Concat<axis=1>(g, g)
    r = Reshape(c, shape)
    y = Clip(r)
    v, k = TopK(g, two)
}""",
    "control": """<ir_version: 8, opset_import: ["": 18]>
main (float[4] x, int64 n, bool go) => (float[4] y, float[K,4] s) {
    y, s = Loop(n, go, x) <body = body (int64 i, bool c, float[4] a) => (bool d, float[4] b, float[4] o) {
        d = Identity(c)
        b = Sin(a)
        o = Mul(b, x)
    }>
}""",
}


@cache
def _sound(name: str) -> bytes:
    """The bytes of a model, or of the program of one (a name that ends in .prefuse)."""
    stem = name.removesuffix(".prefuse")
    content = parser.parse_model(_MODELS[stem]).SerializeToString()
    if stem == name:
        return bytes(content)
    folder = Path(tempfile.mkdtemp())
    try:
        net = prefuse.compile(content, cache=False, name=stem)
        net.save(folder / name)
        return (folder / name).read_bytes()
    finally:
        shutil.rmtree(folder)


def mutations(count: int, seed: int = 0) -> Iterator[Sample]:
    """`count` broken files: half models, half programs."""
    sources = [*_MODELS, "network.prefuse", "indices.prefuse"]
    for number in range(count):
        source = sources[number % len(sources)]
        content = _mutated(_sound(source), np.random.default_rng([seed, number]))
        yield Sample(f"{source} mutated, {seed}:{number}", _Writer(source, content))


class _Writer:
    def __init__(self, source: str, content: bytes) -> None:
        self.name = source if source.endswith(".prefuse") else f"{source}.onnx"
        self.content = content

    def __call__(self, folder: Path) -> Path:
        path = folder / self.name
        path.write_bytes(self.content)
        return path


def _mutated(content: bytes, generator: np.random.Generator) -> bytes:
    changed = bytearray(content)
    for _ in range(int(generator.integers(1, 3))):
        kind, at = generator.integers(0, 10) - 4, int(generator.integers(0, len(changed)))
        length = int(generator.integers(1, 1 + min(64, len(changed) - at)))
        if kind <= 1:
            changed[at] ^= 1 << int(generator.integers(0, 8))
        elif kind == 2:
            changed[at] = int(generator.choice([0, 1, 0x7F, 0x80, 0xFF]))
        elif kind == 3:
            del changed[at : at + length]
        elif kind == 4:
            changed[at:at] = changed[at : at + length]
        else:
            del changed[max(at, 1) :]
    return bytes(changed)


def sound_models() -> dict[str, onnx.ModelProto]:
    """The models that mutations start from."""
    return {name: parser.parse_model(text) for name, text in _MODELS.items()}
