"""Models that run in stages, for the tests of their files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import prefuse
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.staged.procedure import ProgramStep
from prefuse.runtime.staged.staged_model import StagedModel

HEADER = '<ir_version: 10, opset_import: ["": 21]>\n'
_WEIGHTS = ", ".join(f"{0.25 * number}" for number in range(1, 7))

# A loop whose body decides between two programs with weights of their own, captures, and stops by the data.
NESTED = f"""main (float[6] x, int64 n, bool go) => (float[6] y, float[K,6] s)
    <float[6] w = {{{_WEIGHTS}}}> {{
    y, s = Loop(n, go, x) <body = body (int64 i, bool c, float[6] a) => (bool again, float[6] b, float[6] o) {{
        two = Constant<value_int=2>()
        rest = Mod(i, two)
        odd = Cast<to=9>(rest)
        b = If(odd) <then_branch = then () => (float[6] t) {{ p = Mul(a, w) t = Add(p, x) }},
                     else_branch = otherwise () => (float[6] e) {{ q = Add(a, w) e = Sin(q) }}>
        o = Neg(b)
        largest = ReduceMax<keepdims=0>(b)
        limit = Constant<value_float=50.0>()
        again = Less(largest, limit)
    }}>
}}"""


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def compiled_stages(text: str) -> StagedModel:
    net = prefuse.compile(onnx.parser.parse_model(HEADER + text), cache=False)
    program = net.programs[0] if hasattr(net, "programs") else net
    assert isinstance(program, StagedModel)
    return program


def is_same(found: Any, wanted: Any) -> bool:
    """Whether results are equal to the bit."""
    if isinstance(wanted, (list, tuple)):
        return type(found) is type(wanted) and len(found) == len(wanted) and all(map(is_same, found, wanted))
    if wanted is None:
        return found is None
    if wanted.dtype == object:
        return bool(found.tolist() == wanted.tolist())
    return (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


def programs_of(model: StagedModel) -> Iterator[CompiledModel]:
    for step in model.program.procedure.walk():
        if isinstance(step, ProgramStep):
            assert isinstance(step.program, CompiledModel)
            yield step.program
