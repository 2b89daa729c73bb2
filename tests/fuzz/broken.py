"""Files that are broken on purpose, each in one way: structure, types, sizes, attributes, files beside the model, archives."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import prefuse
from onnx import TensorProto, helper, parser

from .judge import Sample
from .mutations import sound_models

_HEADER = '<ir_version: 8, opset_import: ["": 18]>\n'
_HUGE = 1 << 40


def broken_files() -> Iterator[Sample]:
    """The whole corpus."""
    yield from (Sample(f"text: {name}", _text(text), has_answer=False) for name, text in _TEXTS.items())
    yield from (Sample(f"proto: {name}", _proto(change), has_answer=False) for name, change in _CHANGES.items())
    yield from (Sample(f"built: {name}", _built(build), has_answer=False) for name, build in _BUILT.items())
    yield from (Sample(f"external: {name}", write, has_answer=False) for name, write in _EXTERNAL.items())
    yield from (Sample(f"archive: {name}", _archive(change), has_answer=False) for name, change in _ARCHIVES.items())
    yield from (Sample(f"bytes: {name}", _raw(*content), has_answer=False) for name, content in _RAW.items())


# Models that onnx can spell, and that ask for what cannot be.
_TEXTS: dict[str, str] = {
    "used before made": "main (float[2] x) => (float[2] y) { y = Add(x, z) z = Relu(x) }",
    "cycle": "main (float[2] x) => (float[2] y) { a = Add(x, b) b = Relu(a) y = Neg(b) }",
    "itself": "main (float[2] x) => (float[2] y) { y = Add(x, y) }",
    "made twice": "main (float[2] x) => (float[2] y) { y = Relu(x) y = Neg(x) }",
    "output nobody makes": "main (float[2] x) => (float[2] y) { z = Relu(x) }",
    "unknown operator": "main (float[2] x) => (float[2] y) { y = Magic(x) }",
    "unknown attribute": "main (float[2] x) => (float[2] y) { y = Relu<power=9>(x) }",
    "attribute of the wrong type": "main (float[2,2] x) => (float[2,2] y) { y = Softmax<axis=1.5>(x) }",
    "too many inputs": "main (float[2] x) => (float[2] y) { y = Relu(x, x) }",
    "too few inputs": "main (float[2] x) => (float[2] y) { y = Add(x) }",
    "axis out of range": "main (float[2,2] x) => (float[2,2] y) { y = Softmax<axis=7>(x) }",
    "permutation with a repeat": "main (float[2,3] x) => (float[2,2] y) { y = Transpose<perm=[0,0]>(x) }",
    "shapes that do not fit": "main (float[2,3] x, float[4,5] w) => (float[2,5] y) { y = MatMul(x, w) }",
    "types that do not fit": "main (float[2] x, int64[2] w) => (float[2] y) { y = Add(x, w) }",
    "declared output shape is wrong": "main (float[2,3] x) => (float[7] y) { y = Relu(x) }",
    "declared output type is wrong": "main (float[2,3] x) => (int64[2,3] y) { y = Relu(x) }",
    "strides of zero": "main (float[1,1,4,4] x, float[1,1,2,2] w) => (float[1,1,3,3] y) { y = Conv<strides=[0,0]>(x, w) }",
    "negative strides": "main (float[1,1,4,4] x, float[1,1,2,2] w) => (float[1,1,3,3] y) { y = Conv<strides=[-1,-1]>(x, w) }",
    "negative pads": "main (float[1,1,4,4] x, float[1,1,2,2] w) => (float[1,1,1,1] y) { y = Conv<pads=[-1,-1,-1,-1]>(x, w) }",
    "pads beyond everything": (
        "main (float[1,1,4,4] x, float[1,1,2,2] w) => (float[A,B,C,D] y) { y = Conv<pads=[99999999,0,0,0]>(x, w) }"
    ),
    "group of zero": "main (float[1,2,4,4] x, float[2,1,2,2] w) => (float[1,2,3,3] y) { y = Conv<group=0>(x, w) }",
    "groups that do not divide": "main (float[1,3,4,4] x, float[2,1,2,2] w) => (float[1,2,3,3] y) { y = Conv<group=2>(x, w) }",
    "window of zero": "main (float[1,1,4,4] x) => (float[A,B,C,D] y) { y = MaxPool<kernel_shape=[0,0]>(x) }",
    "window beyond the input": "main (float[1,1,4,4] x) => (float[A,B,C,D] y) { y = MaxPool<kernel_shape=[9,9]>(x) }",
    "window of the wrong rank": "main (float[1,1,4,4] x) => (float[A,B,C,D] y) { y = AveragePool<kernel_shape=[2]>(x) }",
    "dilation of zero": ("main (float[1,1,4,4] x) => (float[A,B,C,D] y) { y = MaxPool<kernel_shape=[2,2], dilations=[0,0]>(x) }"),
    "huge tile": "main (float[2] x) => (float[N] y) <int64[1] r = {1099511627776}> { y = Tile(x, r) }",
    "huge expand": "main (float[1] x) => (float[N] y) <int64[1] r = {1099511627776}> { y = Expand(x, r) }",
    "huge pad": "main (float[1] x) => (float[N] y) <int64[2] r = {1099511627776,0}> { y = Pad(x, r) }",
    "huge constant of a shape": "main () => (float[N] y) <int64[2] r = {1099511627776,4}> { y = ConstantOfShape(r) }",
    "overflowing shape": ("main () => (float[N] y) <int64[3] r = {4294967296,4294967296,4294967296}> { y = ConstantOfShape(r) }"),
    "negative shape": "main () => (float[N] y) <int64[1] r = {-5}> { y = ConstantOfShape(r) }",
    "huge range": "main () => (int64[N] y) <int64 a = {0}, int64 b = {1099511627776}, int64 c = {1}> { y = Range(a, b, c) }",
    "range of step zero": "main () => (int64[N] y) <int64 a = {0}, int64 b = {9}, int64 c = {0}> { y = Range(a, b, c) }",
    "huge one-hot": "main (int64[2] i, float[2] v) => (float[2,N] y) <int64 d = {1099511627776}> { y = OneHot(i, d, v) }",
    "huge input": "main (float[1099511627776] x) => (float[1099511627776] y) { y = Relu(x) }",
    "overflowing input": "main (float[4294967296,4294967296,4] x) => (float[4294967296,4294967296,4] y) { y = Relu(x) }",
    "huge product": "main (float[1048576,2] x, float[2,1048576] w) => (float[1048576,1048576] y) { y = MatMul(x, w) }",
    "impossible reshape": "main (float[2,3] x) => (float[5] y) <int64[1] s = {5}> { y = Reshape(x, s) }",
    "two unknowns in a reshape": "main (float[2,3] x) => (float[A,B] y) <int64[2] s = {-1,-1}> { y = Reshape(x, s) }",
    "split that does not add up": "main (float[6] x) => (float[2] y, float[2] z) <int64[2] s = {2,2}> { y, z = Split(x, s) }",
    "k beyond the axis": "main (float[6] x) => (float[9] y, int64[9] i) <int64[1] k = {9}> { y, i = TopK(x, k) }",
    "negative k": "main (float[6] x) => (float[N] y, int64[N] i) <int64[1] k = {-1}> { y, i = TopK(x, k) }",
    "slice of step zero": (
        "main (float[6] x) => (float[N] y) <int64[1] a = {0}, int64[1] b = {6}, int64[1] c = {0}> { y = Slice(x, a, b, a, c) }"
    ),
    "squeeze of what is no one": "main (float[6,2] x) => (float[N] y) <int64[1] a = {0}> { y = Squeeze(x, a) }",
    "index out of range": "main (float[6] x) => (float[1] y) <int64[1] i = {99}> { y = Gather(x, i) }",
    "index far out of range": "main (float[6] x) => (float[1] y) <int64[1] i = {4611686018427387904}> { y = Gather(x, i) }",
    "indices out of range at run time": (
        "main (float[6] x) => (float[1] y) <int64[1] i = {99}> { j = Sub(i, i) k = Add(i, j) y = Gather(x, k) }"
    ),
    "scatter out of range": (
        "main (float[6] x, float[1] u) => (float[6] y) <int64[1] i = {99}> { y = ScatterElements(x, i, u) }"
    ),
    "einsum of nonsense": 'main (float[6] x) => (float[6] y) { y = Einsum<equation="ij,->k">(x) }',
    "einsum without letters": 'main (float[6] x) => (float[6] y) { y = Einsum<equation="">(x) }',
    "division by zero": "main (int64[2] x) => (int64[2] y) <int64 z = {0}> { y = Div(x, z) }",
    "remainder by zero": "main (int64[2] x) => (int64[2] y) <int64 z = {0}> { y = Mod(x, z) }",
    "least by minus one": (
        "main (int64[1] x) => (int64[1] y) <int64[1] m = {-9223372036854775808}, int64 z = {-1}> { "
        "s = Sub(x, x) n = Add(s, m) y = Div(n, z) }"
    ),
    "branches of unlike types": (
        "main (bool c, float[2] x) => (float[2] y) { "
        "y = If(c) <then_branch = a () => (float[2] t) { t = Relu(x) }, else_branch = b () => (int64[2] e) { e = "
        "Cast<to=7>(x) }> }"
    ),
    "loop without end and without work": (
        "main (float[2] x) => (float[2] y) <bool t = {1}> { "
        'y = Loop("", t, x) <body = b (int64 i, bool c, float[2] a) => (bool d, float[2] o) { d = Identity(c) o = '
        "Identity(a) }> }"
    ),
    "body with too few outputs": (
        "main (float[2] x, int64 n) => (float[2] y) <bool t = {1}> { "
        "y = Loop(n, t, x) <body = b (int64 i, bool c, float[2] a) => (bool d) { d = Identity(c) }> }"
    ),
    "body that captures what is not there": (
        "main (bool c, float[2] x) => (float[2] y) { "
        "y = If(c) <then_branch = a () => (float[2] t) { t = Relu(nothing) }, else_branch = b () => (float[2] e) "
        "{ e = Neg(x) }> }"
    ),
    "sequence where a tensor is due": "main (seq(float[2]) s) => (float[2] y) { y = Relu(s) }",
    "tensor where a sequence is due": "main (float[2] s, int64 i) => (float[2] y) { y = SequenceAt(s, i) }",
    "string where a number is due": "main (string[2] s) => (string[2] y) { y = Relu(s) }",
    "cast to no type": "main (float[2] x) => (float[2] y) { y = Cast<to=99>(x) }",
    "empty axes": "main (float[2,0] x) => (float[2] y) <int64[1] a = {1}> { y = ReduceMax<keepdims=0>(x, a) }",
    "repeated axes": "main (float[2,3] x) => (float[A] y) <int64[2] a = {1,1}> { y = ReduceSum<keepdims=0>(x, a) }",
    "resize to nothing": 'main (float[1,1,4,4] x) => (float[A,B,C,D] y) <float[4] s = {1,1,0,0}> { y = Resize(x, "", s) }',
    "resize to everything": (
        'main (float[1,1,4,4] x) => (float[A,B,C,D] y) <float[4] s = {1,1,1e9,1e9}> { y = Resize(x, "", s) }'
    ),
    "resize by not a number": (
        'main (float[1,1,4,4] x) => (float[A,B,C,D] y) <float[4] s = {1,1,-1,1}> { y = Resize(x, "", s) }'
    ),
    "recurrence of no size": (
        "main (float[2,1,3] x, float[1,4,3] w, float[1,4,1] r) => (float[2,1,1,1] y) { y = LSTM<hidden_size=0>(x, w, r) }"
    ),
    "recurrence with an unknown activation": (
        "main (float[2,1,3] x, float[1,4,3] w, float[1,4,1] r) => (float[2,1,1,1] y) { "
        'y = LSTM<hidden_size=1, activations=["A","B","C"]>(x, w, r) }'
    ),
}


def _relu() -> onnx.ModelProto:
    return parser.parse_model(
        _HEADER + "main (float[2,3] x) => (float[2,3] y) <float[3] w = {1,2,3}> { z = Add(x, w) y = Relu(z) }"
    )


def _initializer(model: onnx.ModelProto) -> Any:
    return model.graph.initializer[0]


def _raw_data(model: onnx.ModelProto, content: bytes) -> None:
    _initializer(model).ClearField("float_data")
    _initializer(model).raw_data = content


def _name_alike(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.name = "n"


# Sound models with one field changed.
_CHANGES: dict[str, Callable[[onnx.ModelProto], object]] = {
    "no graph": lambda m: m.ClearField("graph"),
    "no opset": lambda m: m.ClearField("opset_import"),
    "opset of the future": lambda m: setattr(m.opset_import[0], "version", 9999),
    "negative opset": lambda m: setattr(m.opset_import[0], "version", -1),
    "no input type": lambda m: m.graph.input[0].ClearField("type"),
    "no input shape": lambda m: m.graph.input[0].type.tensor_type.ClearField("shape"),
    "no element type": lambda m: m.graph.input[0].type.tensor_type.ClearField("elem_type"),
    "unknown element type": lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 77),
    "negative dimension": lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", -3),
    "no input name": lambda m: setattr(m.graph.input[0], "name", ""),
    "no output name": lambda m: setattr(m.graph.output[0], "name", ""),
    "two inputs of one name": lambda m: m.graph.input.append(m.graph.input[0]),
    "two outputs of one name": lambda m: m.graph.output.append(m.graph.output[0]),
    "two initializers of one name": lambda m: m.graph.initializer.append(m.graph.initializer[0]),
    "two nodes of one name": _name_alike,
    "nodes without outputs": lambda m: m.graph.node[0].ClearField("output"),
    "node without an operator": lambda m: m.graph.node[0].ClearField("op_type"),
    "nodes in the wrong order": lambda m: m.graph.node.reverse(),
    "raw data too short": lambda m: _raw_data(m, b"\0" * 5),
    "raw data too long": lambda m: _raw_data(m, b"\0" * 500),
    "typed data too short": lambda m: _initializer(m).float_data.__delitem__(slice(1, None)),
    "typed data of another type": lambda m: setattr(_initializer(m), "data_type", TensorProto.INT64),
    "unknown type of data": lambda m: setattr(_initializer(m), "data_type", 55),
    "negative size of data": lambda m: _initializer(m).dims.__setitem__(0, -3),
    "huge size of data": lambda m: _initializer(m).dims.__setitem__(0, _HUGE),
    "data without a name": lambda m: setattr(_initializer(m), "name", ""),
    "strings without encoding": lambda m: m.graph.initializer.append(
        TensorProto(name="s", data_type=TensorProto.STRING, dims=[1], string_data=[b"\xff\xfe"])
    ),
    "negative file format": lambda m: setattr(m, "ir_version", -4),
}


def _chain(length: int) -> onnx.ModelProto:
    nodes = [helper.make_node("Relu", [f"v{i}"], [f"v{i + 1}"]) for i in range(length)]
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("v0", f"v{length}")]
    return helper.make_model(helper.make_graph(nodes, "chain", value[:1], value[1:]), opset_imports=[helper.make_opsetid("", 18)])


def _nested(depth: int) -> onnx.ModelProto:
    """An If in an If in an If ..."""
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "leaf", [], [output])
    for level in range(depth):
        other = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], f"else{level}", [], [output])
        node = helper.make_node("If", ["c"], ["y"], then_branch=graph, else_branch=other)
        graph = helper.make_graph([node], f"level{level}", [], [output])
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    graph.input.extend(inputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


def _functions(*calls: tuple[str, str]) -> onnx.ModelProto:
    """A model that calls the first function; each function of the pairs calls the other of its pair."""
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    made = [
        helper.make_function("f", name, ["a"], ["b"], [helper.make_node(other, ["a"], ["b"], domain="f")], imports)
        for name, other in calls
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node(calls[0][0], ["x"], ["y"], domain="f")], "g", ports[:1], ports[1:])
    return helper.make_model(graph, functions=made, opset_imports=imports)


def doubling_functions(levels: int) -> onnx.ModelProto:
    """Functions that call the next one twice: 2^levels nodes out of a short file."""
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    made = [helper.make_function("f", f"f{levels}", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], imports)]
    for level in range(levels):
        calls = [helper.make_node(f"f{level + 1}", [one], [two], domain="f") for one, two in (("a", "m"), ("m", "b"))]
        made.append(helper.make_function("f", f"f{level}", ["a"], ["b"], calls, imports))
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("f0", ["x"], ["y"], domain="f")], "g", ports[:1], ports[1:])
    return helper.make_model(graph, functions=made, opset_imports=imports)


# Sound by the letter, and too much of something.
_BUILT: dict[str, Callable[[], onnx.ModelProto]] = {
    "a long chain": lambda: _chain(3000),
    "deep nesting": lambda: _nested(20),
    "very deep nesting": lambda: _nested(30),
    "a function that calls itself": lambda: _functions(("a", "a")),
    "functions in a circle": lambda: _functions(("a", "b"), ("b", "a")),
    "a call of nothing": lambda: _functions(("a", "b")),
    "functions that double": lambda: doubling_functions(40),
}


def _external(location: str, make: Callable[[Path], object] | None = None, **fields: int) -> Callable[[Path], Path]:
    """A model whose weights are in a file of this name; `make` prepares the folder around the model's."""

    def write(folder: Path) -> Path:
        model = _relu()
        tensor = _initializer(model)
        tensor.ClearField("float_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": location, **fields}.items():
            tensor.external_data.add(key=key, value=str(value))
        home = folder / "home"
        home.mkdir()
        (folder / "secret").write_bytes(b"\0" * 64)
        if make is not None:
            make(home)
        path = home / "m.onnx"
        path.write_bytes(model.SerializeToString())
        return path

    return write


_EXTERNAL = {
    "outside": _external("../secret"),
    "absolute": _external("/etc/passwd"),
    "far outside": _external("../../../../../../../../etc/passwd"),
    "missing": _external("w.bin"),
    "no name": _external(""),
    "the folder": _external("."),
    "a symbolic link outwards": _external("w", lambda home: os.symlink(home.parent / "secret", home / "w")),
    "a pipe": _external("w", lambda home: os.mkfifo(home / "w")),
    "too short": _external("w", lambda home: (home / "w").write_bytes(b"\0" * 3)),
    "a negative offset": _external("w", lambda home: (home / "w").write_bytes(b"\0" * 64), offset=-8, length=12),
    "an offset beyond the end": _external("w", lambda home: (home / "w").write_bytes(b"\0" * 64), offset=_HUGE, length=12),
    "a length that is none": _external("w", lambda home: (home / "w").write_bytes(b"\0" * 64), offset=0, length=-1),
    "a name with a zero": _external("w\0x"),
    "a very long name": _external("w" * 5000),
}


def _program(folder: Path) -> Path:
    path = folder / "sound.prefuse"
    prefuse.compile(sound_models()["network"].SerializeToString(), cache=False, name="m").save(path)
    return path


Members = list[tuple[str, bytes]]


def _archive(change: Callable[[Members], Members], compression: int = zipfile.ZIP_STORED) -> Callable[[Path], Path]:
    """A sound program, with its members changed."""

    def write(folder: Path) -> Path:
        with zipfile.ZipFile(_program(folder)) as archive:
            members = [(name, archive.read(name)) for name in archive.namelist()]
        path = folder / "broken.prefuse"
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, content in change(members):
                archive.writestr(zipfile.ZipInfo(name), content, compression)
        return path

    return write


def _edit(name: str, edit: Callable[[bytes], bytes]) -> Callable[[Members], Members]:
    return lambda members: [(one, edit(content) if one == name else content) for one, content in members]


def _manifest(**changes: object) -> Callable[[Members], Members]:
    return _edit("manifest.json", lambda content: json.dumps({**json.loads(content), **changes}).encode())


_ARCHIVES: dict[str, Callable[[Members], Members]] = {
    "an absolute path": lambda members: [*members, ("/etc/evil", b"x")],
    "a path upwards": lambda members: [*members, ("../evil", b"x")],
    "a member twice": lambda members: [*members, members[0]],
    "a member missing": lambda members: members[1:],
    "no manifest": lambda members: [one for one in members if one[0] != "manifest.json"],
    "a manifest that is a list": _edit("manifest.json", lambda content: b"[]"),
    "a manifest that nests": _edit("manifest.json", lambda content: b"[" * 100_000),
    "hashes that are none": _manifest(sha256={}),
    "a format of the future": _manifest(format=99),
    "a target that is none": _manifest(target="toaster"),
    "a plan that is none": _edit("plan.txt", lambda content: b"\xff\xff\xff"),
    "a plan of half": _edit("plan.txt", lambda content: content[: len(content) // 2]),
    "other code": _edit("library.so", lambda content: b"\x7fELF" + bytes(4096)),
    "code cut short": _edit("library.so", lambda content: content[:2000]),
    "weights cut short": _edit("constants.safetensors", lambda content: content[:40]),
    "weights with a huge header": _edit("constants.safetensors", lambda content: (1 << 60).to_bytes(8, "little") + content[8:]),
}

_RAW: dict[str, tuple[str, bytes]] = {
    "an empty model": ("m.onnx", b""),
    "a model of zeros": ("m.onnx", bytes(1000)),
    "a model of text": ("m.onnx", b"hello, world\n" * 50),
    "a picture": ("m.onnx", b"\x89PNG\r\n\x1a\n" + bytes(range(256))),
    "an empty program": ("m.prefuse", b""),
    "a program that is no archive": ("m.prefuse", b"PK\x03\x04" + bytes(500)),
    "text of a model with nested brackets": ("m.onnxtxt", b"<" * 50_000),
    "json of a model that nests": ("m.json", b'{"graph":' * 50_000),
}


def _text(text: str) -> Callable[[Path], Path]:
    return lambda folder: _save(parser.parse_model(_HEADER + text), folder)


def _proto(change: Callable[[onnx.ModelProto], object]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        model = _relu()
        change(model)
        return _save(model, folder)

    return write


def _built(build: Callable[[], onnx.ModelProto]) -> Callable[[Path], Path]:
    return lambda folder: _save(build(), folder)


def _raw(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def _save(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return path
