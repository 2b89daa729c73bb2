"""Files of models in stages: what is written is read back and runs without a compiler; all else is one ProgramFileError."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import prefuse
import pytest
from prefuse.runtime.errors import OptionError
from prefuse.runtime.program_file import read_program
from prefuse.runtime.staged.staged_model import StagedModel

from .staged_models import HEADER, compiled_stages, floats, is_same, programs_of

_SCAN = """main (float[3] start, float[3,4] xs, float[4,3] zs, float[2000] g) => (float[3] final, float[3,4] ys, float[4,3] ws) {
    most = ReduceMax<keepdims=0>(g)
    go = Cast<to=9>(most)
    final, ys, ws = If(go) <then_branch = then () => (float[3] f1, float[3,4] y1, float[4,3] w1) {
        f1, y1, w1 = Scan<num_scan_inputs=2, scan_input_axes=[1,0], scan_input_directions=[0,1],
                          scan_output_axes=[1,0], scan_output_directions=[1,0],
            body = body (float[3] a, float[3] x, float[3] z) => (float[3] b, float[3] y, float[3] w) {
                b = Add(a, x)
                y = Mul(b, z)
                w = Sub(b, x)
            }>(start, xs, zs)
    }, else_branch = otherwise () => (float[3] f2, float[3,4] y2, float[4,3] w2) {
        f2 = Neg(start)
        y2 = Neg(xs)
        w2 = Neg(zs)
    }>
}"""

_MAP = """main (seq(float[2]) s, float[2] k) => (seq(float[2]) y, int64 n, float[2] last) {
    y = SequenceMap(s, k) <body = body (float[2] a, float[2] c) => (float[2] o) { d = Mul(a, a) o = Add(d, c) }>
    n = SequenceLength(y)
    at = Constant<value_int=-1>()
    last = SequenceAt(y, at)
}"""

_SEQUENCES = """main (seq(float[N]) s, float[3] x) => (float[M] y, seq(float[N]) t, seq(float[N]) u) {
    front = Constant<value_int=0>()
    t = SequenceInsert(s, x, front)
    u = SequenceErase(t, front)
    y = ConcatFromSequence<axis=0>(t)
}"""

_OPTIONAL = """main (optional(float[2]) o) => (float[2] y) {
    has = OptionalHasElement(o)
    y = If(has) <then_branch = then () => (float[2] t) { v = OptionalGetElement(o) t = Neg(v) },
                 else_branch = otherwise () => (float[2] e) { e = Constant<value_floats=[1.0, 2.0]>() }>
}"""

_STRINGS = """main (float[2000] g) => (string[2] y) {
    most = ReduceMax<keepdims=0>(g)
    c = Cast<to=9>(most)
    y = If(c) <then_branch = then () => (string[2] t) { t = Constant<value_strings=["a", "é"]>() },
               else_branch = otherwise () => (string[2] e) { e = Constant<value_strings=["", "b"]>() }>
}"""

_FILL = """main (float[3000] x) => (int32[N,2] y) {
    most = ReduceMax<keepdims=0>(x)
    count = Cast<to=7>(most)
    axis = Constant<value_ints=[0]>()
    rows = Unsqueeze(count, axis)
    two = Constant<value_ints=[2]>()
    shape = Concat<axis=0>(rows, two)
    y = ConstantOfShape<value = int32[1] {7}>(shape)
}"""


_DECISIONS = [np.full(2000, value, np.float32) for value in (0, 1)]  # too large to compile for their values
_SEQUENCE = [floats(2), floats(2, seed=1)]
_CASES: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    "scan": (_SCAN, [(floats(3), floats(3, 4), floats(4, 3), go) for go in _DECISIONS]),
    "map": (_MAP, [(_SEQUENCE, floats(2)), (_SEQUENCE[:1], floats(2))]),
    "sequences": (_SEQUENCES, [([], floats(3)), ([floats(4)], floats(3))]),
    "optional": (_OPTIONAL, [(None,), (floats(2),)]),
    "strings": (_STRINGS, [(go,) for go in _DECISIONS]),
    "fill": (_FILL, [(np.full(3000, rows, np.float32),) for rows in (0, 3)]),
}


@pytest.mark.parametrize("case", _CASES)
def test_round_trip(case: str, tmp_path: Path) -> None:
    text, calls = _CASES[case]
    net = compiled_stages(text)
    net.save(tmp_path / "a.prefuse")
    again = prefuse.load(tmp_path / "a.prefuse")
    assert isinstance(again, StagedModel)
    assert (again.inputs, again.outputs, again.report()) == (net.inputs, net.outputs, net.report())
    for call in calls:
        assert is_same(again(*call), net(*call))
    again.save(tmp_path / "b.prefuse")
    assert (tmp_path / "a.prefuse").read_bytes() == (tmp_path / "b.prefuse").read_bytes()


def test_nested_control_flow_round_trip(nested: StagedModel, nested_file: Path) -> None:
    again = prefuse.load(nested_file)
    for trips, goes_on in ((0, True), (4, True), (5, False), (100, True)):
        call = (floats(6), np.array(trips), np.array(goes_on))
        assert is_same(again(*call), nested(*call))


def test_a_model_is_saved_over_the_file_that_it_is_mapped_from(nested_file: Path, tmp_path: Path) -> None:
    content, path = nested_file.read_bytes(), tmp_path / "x.prefuse"
    path.write_bytes(content)
    prefuse.load(path).save(path)
    assert path.read_bytes() == content


def test_weights_of_stages_are_mapped_and_aligned(nested_file: Path) -> None:
    model = prefuse.load(nested_file)
    assert isinstance(model, StagedModel)
    weights = [program.program.constants for program in programs_of(model) if program.program.constants.size]
    assert weights
    assert all(array.ctypes.data % 64 == 0 and not array.flags.writeable for array in weights)


def test_a_stage_is_a_program_file(nested_file: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(nested_file) as archive:
        assert archive.testzip() is None
        path = Path(archive.extract("stage-1.prefuse", tmp_path))
    assert read_program(path).plan.inputs


def test_it_runs_where_no_compiler_is(nested: StagedModel, nested_file: Path) -> None:
    program = (
        "import sys\n"
        "for name in ('onnx', 'onnx_ir', 'torch', 'onnxscript'): sys.modules[name] = None\n"
        "import numpy, prefuse\n"
        f"net = prefuse.load({str(nested_file)!r})\n"
        "y, s = net(x=numpy.ones(6, 'float32'), n=numpy.array(3), go=numpy.array(True))\n"
        "print(y.tolist(), s.shape, 'tvm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    results = nested(np.ones(6, np.float32), np.array(3), np.array(True))
    assert isinstance(results, tuple)
    y = results[0]
    assert done.stdout.strip() == f"{y.tolist()} (3, 6) False"


# ------------------------------------------------------------------------------------------------- what cannot be saved


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            """main (float[4,6] x) => (float[N] y) {
                z = Constant<value_int=0>()
                p = NonZero(x)
                r = Transpose<perm=[1,0]>(p)
                c = GatherND(x, r)
                y = CumSum(c, z)
            }""",
            "stage 2 is compiled for the shapes of each run",
        ),
        (
            "main (string[N] a, string[N] b) => (string[N] y) { y = StringConcat(a, b) }",
            "StringConcat at y is computed",
        ),
    ],
)
def test_what_no_file_can_hold_is_named(text: str, fault: str, tmp_path: Path) -> None:
    net = prefuse.compile(onnx.parser.parse_model(HEADER + text), cache=False)
    if hasattr(net, "programs"):
        net(*[np.array(["a"], object)] * 2)
    with pytest.raises(OptionError, match=fault):
        net.save(tmp_path / "x.prefuse")
    assert not list(tmp_path.iterdir())
