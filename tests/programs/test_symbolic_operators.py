"""Operators that shapes of a call go through: one program for all sizes, with the numbers of a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import prefuse
import pytest
import torch
from prefuse.compiler.programs.symbolic import SymbolicModel
from prefuse.runtime.target import AMX_EMULATED
from prefuse.tests.kernels.harness import LEVELS, target_of
from torch import Tensor, nn

from .test_symbolic import assert_right, compiled, model_of

OPSET = 'ir_version: 10, opset_import: ["": 20]'
MODELS = {
    "GatherND": "(float[N,6] x, int64[M,2] i) => (float[M] y) { y = GatherND(x, i) }",
    "GatherND of rows": "(float[N,6] x, int64[M,1] i) => (float[M,6] y) { y = GatherND(x, i) }",
    "ScatterND": "(float[N,6] x, int64[M,1] i, float[M,6] u) => (float[N,6] y) { z = Relu(x) y = ScatterND(z, i, u) }",
    "ScatterElements": "(float[N,6] x, int64[M,6] i, float[M,6] u) => (float[N,6] y) { y = ScatterElements(x, i, u) }",
    "DepthToSpace": "(float[N,8,M,3] x) => (float[N,2,A,6] y) { z = DepthToSpace <blocksize = 2> (x) y = Relu(z) }",
    "SpaceToDepth": "(float[N,2,M,4] x) => (float[N,8,A,2] y) { z = SpaceToDepth <blocksize = 2> (x) y = Relu(z) }",
    "ReverseSequence": "(float[M,N,5] x, int64[N] l) => (float[M,N,5] y) { y = ReverseSequence(x, l) }",
    "Einsum": '(float[N,M,6] x, float[N,M,6] z) => (float[N,A,B] y) { y = Einsum <equation = "bid,bjd->bij"> (x, z) }',
    "Einsum with a sum": '(float[N,M,6] x, float[M,6] z) => (float[N] y) { y = Einsum <equation = "bid,id->b"> (x, z) }',
    "Slice backwards": """(float[N,M] x) => (float[N,M] y) {
        start = Constant <value = int64[2] {-1, 5}> ()
        end = Constant <value = int64[2] {-9223372036854775808, -100}> ()
        axes = Constant <value = int64[2] {0, 1}> ()
        step = Constant <value = int64[2] {-1, -1}> ()
        z = Slice(x, start, end, axes, step)
        y = Relu(z)
    }""",
    "Slice of a shape backwards": """(float[N,M,6] x) => (float[6,M,N] y) {
        start = Constant <value = int64[1] {-1}> ()
        end = Constant <value = int64[1] {-100}> ()
        sizes = Shape(x)
        turned = Slice(sizes, start, end, , start)
        y = Reshape(x, turned)
    }""",
    "ArgMax": "(float[N,M,6] x) => (int64[N,6] y) { y = ArgMax <axis = 1, keepdims = 0> (x) }",
    "TopK of a few": """(float[N,M] x) => (float[K,M] y, int64[K,M] i) {
        k = Constant <value = int64[1] {5}> ()
        y, i = TopK <axis = 0> (x, k)
    }""",
    "TopK of all": """(float[M,N] x) => (float[M,N] y, int64[M,N] i) {
        k = Shape <start = 1, end = 2> (x)
        y, i = TopK <axis = 1, largest = 0> (x, k)
    }""",
    "the middle of each row": """(float[M,N] x) => (float[M,1] y) {
        n = Shape <start = 1, end = 2> (x)
        two = Constant <value = int64[1] {2}> ()
        half = Div(n, two)
        y = Gather <axis = 1> (x, half)
    }""",
    "InstanceNormalization": """(float[2,3,N,M] x, float[3] s, float[3] b) => (float[2,3,N,M] y) {
        y = InstanceNormalization(x, s, b)
    }""",
    "Roll": """(float[N,M] x) => (float[N,M] y) {
        size = Shape <start = 0, end = 1> (x)
        shift = Constant <value = int64[1] {-3}> ()
        zero = Constant <value = int64[1] {0}> ()
        at = Mod(shift, size)
        head = Slice(x, zero, at, zero)
        tail = Slice(x, at, size, zero)
        y = Concat <axis = 0> (tail, head)
    }""",
    **{
        f"Pad, {mode}": f"""(float[N,M] x) => (float[A,B] y) {{
            pads = Constant <value = int64[4] {{3, 1, 2, 0}}> ()
            z = Pad <mode = "{mode}"> (x, pads)
            y = Relu(z)
        }}"""
        for mode in ("reflect", "edge", "wrap")
    },
    **{
        f"Resize to sizes, {how}": f"""(float[2,3,N,M] x, float[A,B] z) => (float[2,3,A,B] y) {{
            first = Shape <start = 0, end = 2> (x)
            last = Shape (z)
            sizes = Concat <axis = 0> (first, last)
            r = Resize <{how}> (x, , , sizes)
            y = Relu(r)
        }}"""
        for how in (
            'mode = "linear"',
            'mode = "linear", coordinate_transformation_mode = "align_corners"',
            'mode = "linear", coordinate_transformation_mode = "pytorch_half_pixel"',
            'mode = "cubic", coordinate_transformation_mode = "pytorch_half_pixel"',
            'mode = "cubic", coordinate_transformation_mode = "align_corners", cubic_coeff_a = -0.5',
            'mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"',
            'mode = "nearest", nearest_mode = "round_prefer_ceil"',
        )
    },
    "Resize by scales": """(float[2,3,N,M] x) => (float[2,3,A,B] y) {
        scales = Constant <value = float[4] {1.0, 1.0, 2.0, 3.0}> ()
        r = Resize <mode = "linear"> (x, , scales)
        y = Relu(r)
    }""",
    **{
        f"Resize by fractions, {mode}": f"""(float[2,3,N,M] x) => (float[2,3,A,B] y) {{
            scales = Constant <value = float[4] {{1.0, 1.0, 0.5, 1.25}}> ()
            r = Resize <mode = "{mode}"> (x, , scales)
            y = Relu(r)
        }}"""
        for mode in ("nearest", "linear", "cubic")
    },
    "Hardmax": "(float[N,6,M] x) => (float[N,6,M] y) { z = Hardmax <axis = 1> (x) y = Add(x, z) }",
    "LpNormalization": "(float[N,M] x) => (float[N,M] y) { y = LpNormalization <p = 2, axis = -1> (x) }",
    "MeanVarianceNormalization": "(float[2,3,N,M] x) => (float[2,3,N,M] y) { y = MeanVarianceNormalization(x) }",
    "BatchNormalization": """(float[N,3,M] x, float[3] s, float[3] b, float[3] m) => (float[N,3,M] y) {
        v = Exp(m)
        y = BatchNormalization(x, s, b, m, v)
    }""",
    "Range downwards": """(float[N,M] x) => (float[N,M] y) {
        s = Shape <start = 1, end = 2> (x)
        zero = Constant <value = int64 {0}> ()
        minus = Constant <value = int64 {-1}> ()
        axes = Constant <value = int64[1] {0}> ()
        m = Squeeze(s, axes)
        r = Range(m, zero, minus)
        f = Cast <to = 1> (r)
        y = Add(x, f)
    }""",
}


def inputs_of(model: onnx.ModelProto, n: int, m: int) -> dict[str, np.ndarray]:
    """Numbers for the inputs; indices reach all of the data and are unique, lengths are those of sequences."""
    random, sizes = np.random.default_rng(n * 100 + m), {"N": n, "M": m, "A": (n * 7) % 50 + 1, "B": n % 9 + 1}
    found: dict[str, np.ndarray] = {}
    for port in model.graph.input:
        kind = port.type.tensor_type
        shape = tuple(dim.dim_value or sizes[dim.dim_param] for dim in kind.shape.dim)
        if kind.elem_type == onnx.TensorProto.FLOAT:
            found[port.name] = random.standard_normal(shape).astype(np.float32)
        elif port.name == "l":
            found[port.name] = random.integers(1, m + 1, shape)
        else:
            rows = random.permutation(n)[:m]
            columns = random.integers(0, 6, m) if shape[-1] == 2 else rows
            found[port.name] = np.stack([rows, columns][: shape[-1]], 1) if shape[-1] < 6 else np.repeat(rows[:, None], 6, 1)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_one_program_serves_all_sizes(name: str) -> None:
    model = model_of(f"<{OPSET}> main {MODELS[name]}")
    named = {dim.dim_param for port in model.graph.input for dim in port.type.tensor_type.shape.dim}
    further = {name: size for name, size in {"A": (1, 50), "B": (1, 9)}.items() if name in named}
    net = compiled(model, dims={"N": (8, 40), "M": (2, 8, 2), **further})
    assert "specialised" not in net.report(), net.report()
    for n, m in ((8, 2), (8, 8), (23, 4), (40, 8)):
        assert_right(net, model, inputs_of(model, n, m))


@pytest.mark.parametrize("how", ["asymmetric", "align_corners"])
def test_whole_coordinates_of_a_resize_are_whole(how: str) -> None:
    """Where a quotient of the sizes is rounded first, floor takes the element before; as onnx.reference's."""
    body = f'r = Resize <coordinate_transformation_mode = "{how}", nearest_mode = "floor"> (x, , , sizes) y = Neg(r)'
    text = f"<{OPSET}> main (float[N] x, float[A] z) => (float[A] y) {{ sizes = Shape (z) {body} }}"
    net = compiled(model_of(text), dims={"N": (2, 60), "A": (2, 60)})
    assert "specialised" not in net.report(), net.report()
    lost = int(how == "align_corners")
    for n, a in ((14, 18), (28, 18), (58, 30), (7, 29), (11, 25)):
        x = np.arange(n, dtype=np.float32)
        found = np.asarray(net(x=x, z=np.zeros(a, np.float32)))
        np.testing.assert_array_equal(-found, np.arange(a) * (n - lost) // (a - lost))


def test_corners_of_a_resize_by_a_fraction_are_those_of_the_result() -> None:
    how = 'mode = "linear", coordinate_transformation_mode = "align_corners"'
    body = f"k = Constant <value_floats = [1.25]> () r = Resize <{how}> (x, , k) y = Neg(r)"
    net = compiled(model_of(f"<{OPSET}> main (float[N] x) => (float[A] y) {{ {body} }}"), dims={"N": (2, 60)})
    assert "specialised" not in net.report(), net.report()
    for n in (7, 8, 59):
        found = np.asarray(net(x=np.arange(n, dtype=np.float32)))
        np.testing.assert_allclose(-found, np.linspace(0, n - 1, n * 5 // 4), rtol=1e-5)


def test_a_slice_backwards_from_in_front_of_the_beginning() -> None:
    """It starts at the first row, as ONNX's text says; onnx.reference finds nothing."""
    constants = (("start", -1000), ("end", -(2**63) + 1), ("axes", 0), ("step", -1))
    lines = " ".join(f"{name} = Constant <value_ints = [{number}]> ()" for name, number in constants)
    body = f"{lines} z = Slice(x, start, end, axes, step) y = Neg(z)"
    model = model_of(f"<{OPSET}> main (float[N,3] x) => (float[1,3] y) {{ {body} }}")
    net = compiled(model, dims={"N": (2, 9)})
    for rows in (2, 9):
        x = np.random.default_rng(rows).standard_normal((rows, 3), np.float32)
        np.testing.assert_array_equal(np.asarray(net(x)), -x[:1])


@pytest.mark.parametrize(
    "text",
    [
        "(float[N,5,M,4] x) => (float[N,5,M,4] y) { y = LRN <size = 3, beta = 0.5> (x) }",
        "(float[N,6,2,M] x) => (float[N,6,2,M] y) { y = LRN <size = 5> (x) }",
        "(float[2,3,N,M] x) => (float[2,3,1,1] y) { y = GlobalLpPool <p = 3> (x) }",
    ],
)
def test_operators_that_the_reference_lacks(text: str) -> None:
    model = model_of(f"<{OPSET}> main {text}")
    net = compiled(model, dims={"N": (8, 40), "M": (2, 8)})
    assert "specialised" not in net.report(), net.report()
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for n, m in ((8, 2), (8, 8), (23, 5), (40, 8)):
        inputs = inputs_of(model, n, m)
        np.testing.assert_allclose(np.asarray(net(**inputs)), session.run(None, inputs)[0], rtol=1e-5, atol=1e-5)


class Scores(nn.Module):
    """Attention written by torch.einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(16, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        q = torch.einsum("bld,dhk->blhk", x, self.weights)
        shares = torch.einsum("bihk,bjhk->bhij", q, q).softmax(-1)
        return torch.einsum("bhij,bjhk->bihk", shares, q)


def ranged(module: nn.Module, *given: Tensor, dims: dict[str, Any], **options: Any) -> SymbolicModel:
    net = prefuse.compile(module, given, dims=dims, cache=False, **{"threads": 2, **options})
    assert isinstance(net, SymbolicModel)
    assert "specialised" not in net.report(), net.report()
    return net


def test_einsum_of_torch() -> None:
    torch.manual_seed(0)
    module = Scores().eval()
    net = ranged(module, torch.randn(2, 20, 16), dims={"x": {0: "B", 1: "L"}, "B": (2, 5), "L": (2, 40)})
    for rows, length in ((2, 2), (3, 17), (5, 40)):
        x = torch.randn(rows, length, 16)
        found: Any = net(x)
        torch.testing.assert_close(found, module(x), rtol=1e-4, atol=1e-5)


class Encoder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        return self.model(ids, attention_mask=mask).last_hidden_state


@pytest.mark.parametrize("kind", ["Bert", "T5Encoder"])
def test_a_mask_of_padding_of_transformers(kind: str) -> None:
    """Which keys there are is looked up by GatherND, at places that Expand makes of constants and sizes."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 1}
    of_t5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    model = getattr(transformers, f"{kind}Model")
    torch.manual_seed(0)
    module = Encoder(model(model.config_class(**(of_t5 if kind == "T5Encoder" else sizes)))).eval()
    given = torch.randint(0, 50, (2, 20)), torch.ones(2, 20, dtype=torch.int64)
    net = ranged(module, *given, dims={"ids": {1: "L"}, "mask": {1: "L"}, "L": (2, 60)})
    for length in (2, 31, 60):
        ids, mask = torch.randint(0, 50, (2, length)), torch.ones(2, length, dtype=torch.int64)
        mask[1, length // 2 :] = 0
        found: Any = net(ids, mask)
        with torch.no_grad():
            torch.testing.assert_close(found, module(ids, mask), rtol=1e-4, atol=1e-5)


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Tensor) -> Tensor:
        return self.function(input)


WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "deviation": torch.std,
    "greatest": torch.max,
    "its place": torch.argmax,
    "share of the norm": lambda x: x / x.norm(),
    "loss": lambda x: ((x - 1) ** 2).mean() + x.abs().sum(),
    "all": lambda x: (x > -9).all(),
    "normalized by the batch": lambda x: nn.functional.batch_norm(x, None, None, training=True),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_computed_of_all_elements(name: str) -> None:
    """Sums of everything had no program for a range: their number of elements was compared with 1.0."""
    module = Applied(WHOLE[name])
    net = ranged(module, torch.randn(5, 6), dims={"input": {0: "N"}, "N": (3, 40)})
    for rows in (3, 17, 40):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(net(x), module(x), rtol=1e-5, atol=1e-5)


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: (2 * x + 1).sigmoid().mean(-1, keepdim=True),
    "variance": lambda x: (2 * x + 1).sigmoid().var(-1),
    "expectation": lambda x: (x.softmax(-1) * x).mean(-1),
    "layer norm": lambda x: nn.functional.layer_norm(2 * x, (x.shape[-1],)),
    "root mean square": lambda x: nn.functional.rms_norm(2 * x, (x.shape[-1],)),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_means_of_what_is_computed_in_rows_of_any_length(name: str) -> None:
    """Rows that a kernel computes and sums up had no form for ranges: their length was to be a float."""
    module = Applied(STATISTICS[name])
    net = ranged(module, torch.randn(5, 20), dims={"input": {1: "T"}, "T": (2, 90)})
    for length in (2, 7, 64, 90):
        x = torch.randn(5, length)
        torch.testing.assert_close(net(x), module(x), rtol=1e-5, atol=1e-5)


def test_sizes_that_a_kernel_would_read_from_memory() -> None:
    """Places that are sizes of a call: no constant holds them, and a kernel was written that was to read one."""
    model = model_of(
        f"""<{OPSET}> main (float[T,4] x) => (float[2,4] y)
        <int64[1] two = {{2}}, int64[1] zero = {{0}}, int64[1] first = {{0}}> {{
            s = Shape (x)
            t = Gather <axis = 0> (s, first)
            h = Div (t, two)
            i = Concat <axis = 0> (zero, h)
            y = Gather <axis = 0> (x, i)
        }}"""
    )
    net = compiled(model, dims={"T": (2, 9)})
    for size in (2, 5, 9):
        x = np.random.default_rng(0).standard_normal((size, 4)).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(net(x)), x[[0, size // 2]])


def test_places_of_numbers_that_are_not_zero_are_specialised() -> None:
    """Their largest number is no number before a call: a pass failed on that."""
    net = prefuse.compile(Applied(torch.nonzero), torch.randn(5), dims={"input": {0: "N"}, "N": (3, 9)}, cache=False)
    for size in (4, 9):
        x = torch.randn(size).relu()
        torch.testing.assert_close(net(x), torch.nonzero(x))


class Tagger(nn.Module):
    """Both directions of two layers, their last states, and a layer that goes on from these."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU | nn.RNN], inputs: int, hidden: int) -> None:
        super().__init__()
        self.layers = kind(inputs, hidden, 2, bidirectional=True, batch_first=True)
        self.further = kind(2 * hidden, hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs, states = self.layers(x)
        begin = tuple(one[:1] for one in states) if isinstance(states, tuple) else states[:1]
        outputs, last = self.further(outputs.transpose(0, 1), begin)
        return outputs, *(last if isinstance(last, tuple) else (last,))


@pytest.mark.parametrize("level", [*LEVELS, AMX_EMULATED])
@pytest.mark.parametrize(("kind", "inputs", "hidden", "rows"), [(nn.LSTM, 24, 36, 3), (nn.GRU, 40, 64, 5), (nn.RNN, 17, 33, 2)])
def test_recurrences_of_any_length(
    kind: type[nn.LSTM | nn.GRU | nn.RNN], inputs: int, hidden: int, rows: int, level: str
) -> None:
    torch.manual_seed(0)
    module = Tagger(kind, inputs, hidden).eval()
    target, dims = str(target_of(level)), {"x": {1: "T"}, "T": (2, 80)}
    net = ranged(module, torch.randn(rows, 9, inputs), dims=dims, target=target, threads=None)
    for length in (2, 3, 15, 16, 17, 32, 33, 80):
        x = torch.randn(rows, length, inputs)
        with torch.no_grad():
            wanted = module(x)
        found = net(x)
        assert isinstance(found, tuple)
        for mine, torchs in zip(found, wanted, strict=True):
            torch.testing.assert_close(torch.as_tensor(mine), torchs, rtol=1e-4, atol=2e-5)


def test_what_is_repeated_may_be_one_element() -> None:
    text = """(float[N] x) => (float[M,2] y)
      <int64[1] one = {1}, int64[1] end = {99}, int64[1] zero = {0}, int64[2] twice = {1, 2}> {
        t = Slice(x, one, end, zero)
        u = Unsqueeze(t, one)
        y = Expand(u, twice)
    }"""
    net = compiled(model_of(f"<{OPSET}> main {text}"), dims={"N": (2, 9)})
    assert "specialised" not in net.report(), net.report()
    for n in (2, 3, 9):
        x = np.arange(n, dtype=np.float32)
        np.testing.assert_array_equal(np.asarray(net(x)), np.repeat(x[1:], 2).reshape(-1, 2))
