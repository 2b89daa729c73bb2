"""Operators that shapes of a call go through: one program for all sizes, with the numbers of a reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import prefuse
import pytest
import torch
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.compiler.programs.symbolic import SymbolicModel
from prefuse.runtime.target import AMX_EMULATED
from prefuse.tests.kernels.harness import LEVELS, target_of
from torch import Tensor, nn

from .test_symbolic import assert_right, compiled, model_of

_OPSET = 'ir_version: 10, opset_import: ["": 20]'
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


def _inputs(model: onnx.ModelProto, n: int, m: int) -> dict[str, np.ndarray]:
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
    model = model_of(f"<{_OPSET}> main {MODELS[name]}")
    named = {dim.dim_param for port in model.graph.input for dim in port.type.tensor_type.shape.dim}
    further = {name: size for name, size in {"A": (1, 50), "B": (1, 9)}.items() if name in named}
    net = compiled(model, dims={"N": (8, 40), "M": (2, 8, 2), **further})
    assert "specialised" not in net.report(), net.report()
    for n, m in ((8, 2), (8, 8), (23, 4), (40, 8)):
        assert_right(net, model, _inputs(model, n, m))


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


def test_places_of_numbers_that_are_not_zero_are_specialised() -> None:
    """Their largest number is no number before a call: a pass failed on that."""
    net = prefuse.compile(Applied(torch.nonzero), torch.randn(5), dims={"input": {0: "N"}, "N": (3, 9)}, cache=False)
    for size in (4, 9):
        x = torch.randn(size).relu()
        torch.testing.assert_close(net(x), torch.nonzero(x))


class UNet(nn.Module):
    """Two levels of an encoder and a decoder, which pads where sizes are odd."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, padding=1), nn.Conv2d(12, 16, 3, padding=1)]
        )
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 12, 2, 2), nn.ConvTranspose2d(8, 8, 4, 2, 1)])
        self.join = nn.ModuleList([nn.Conv2d(24, 8, 3, padding=1), nn.Conv2d(16, 2, 1)])

    def forward(self, input: Tensor) -> Any:
        first = self.down[0](input).relu()
        second = self.down[1](nn.functional.max_pool2d(first, 2)).relu()
        x = self.down[2](nn.functional.max_pool2d(second, 2)).relu()
        for beside, up, join in zip((second, first), self.up, self.join, strict=True):
            x = up(x)
            rows, columns = (beside.shape[axis] - x.shape[axis] for axis in (2, 3))
            x = nn.functional.pad(x, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
            x = join(torch.cat([beside, x], 1))
        return x


IMAGES = {
    "upsampled": nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 6, 4, 2, 1), nn.ConvTranspose2d(6, 4, 3)
    ),
    "grouped transposed": nn.Sequential(
        nn.ConvTranspose2d(3, 6, 5, 3, 2, 1, groups=3), nn.Sigmoid(), nn.ConvTranspose2d(6, 4, 3, dilation=2)
    ),
    "unet": UNet(),
    "stem": nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, 16, 3, 1, 1)),
    "averages": nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.AvgPool2d(2), nn.Conv2d(16, 8, 3, 2, 1), nn.AdaptiveAvgPool2d(1)),
    "dilated": nn.Sequential(nn.Conv2d(3, 8, 3, 1, 2, dilation=2), nn.MaxPool2d(2), nn.Conv2d(8, 12, 5, bias=False)),
    "grouped": nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1, groups=3), nn.Hardsigmoid()),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_of_any_size(name: str) -> None:
    torch.manual_seed(0)
    module = IMAGES[name].eval()
    dims = {"input": {2: "H", 3: "W"}, "H": (20, 150), "W": (24, 90)}
    net = ranged(module, torch.randn(2, 3, 64, 64), dims=dims)
    for height, width in ((20, 24), (33, 57), (150, 90), (64, 64), (101, 33)):
        x = torch.randn(2, 3, height, width)
        found: Any = net(x)
        with torch.no_grad():
            torch.testing.assert_close(found, module(x), rtol=1e-4, atol=1e-5)


class Mobile(nn.Module):
    """A depthwise convolution between pointwise ones, with channels weighted by a mean of all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 48, 1)
        self.deep, self.narrow = nn.Conv2d(48, 48, 5, 2, 2, groups=48), nn.Conv2d(48, 24, 1)
        self.less, self.more = nn.Conv2d(48, 12, 1), nn.Conv2d(12, 48, 1)

    def forward(self, input: Tensor) -> Any:
        x = self.deep(self.wide(self.stem(input).relu()).relu()).relu()
        return self.narrow(x * self.more(self.less(x.mean((2, 3), keepdim=True)).relu()).sigmoid())


PRECISIONS = {"float32-fast": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
NETS = {"unet": UNet(), "mobile": Mobile(), "stem": IMAGES["stem"]}


@pytest.mark.parametrize(("precision", "name"), [(list(PRECISIONS)[n % 3], name) for n, name in enumerate((*NETS, *NETS))][:5])
def test_images_of_any_size_in_any_precision(precision: str, name: str) -> None:
    """Kernels channels-last, of Winograd and of pairs are for any size, too, and no layout is turned between them."""
    torch.manual_seed(0)
    module = NETS[name].eval()
    dims = {"input": {2: "H", 3: "W"}, "H": (24, 150), "W": (20, 90)}
    net = prefuse.compile(module, (torch.randn(2, 3, 64, 64),), dims=dims, precision=precision, cache=False, threads=2)
    assert isinstance(net, SymbolicModel)
    assert "specialised" not in net.report(), net.report()
    assert "padded" not in net.report()
    own = prefuse.compile(module, (torch.randn(2, 3, 64, 64),), precision=precision, cache=False, threads=2)
    assert isinstance(own, SpecializedModel)
    assert len(net.programs[0].plan.steps) <= len(own.programs[0].plan.steps) + 2
    for height, width in ((24, 20), (33, 57), (150, 90), (101, 33)):
        x = torch.randn(2, 3, height, width)
        found: Any = net(x)
        exact = copy.deepcopy(module).double()(x.double()).detach()
        assert (found - exact).abs().max() <= PRECISIONS[precision] * exact.abs().max()


@pytest.mark.parametrize(
    "body",
    [
        '(float[N,3,9,8] x, float[4,3,3,3] w) => (float[N,4,9,8] y) { y = Conv <auto_pad = "SAME_UPPER"> (x, w) }',
        "(float[N,3,9,8] x) => (float[N,3,5,4] y) { y = MaxPool <kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1> (x) }",
    ],
)
def test_any_number_of_images_padded_in_any_way(body: str) -> None:
    model = model_of(f"<{_OPSET}> main {body}")
    net = compiled(model, dims={"N": (2, 9)})
    assert "specialised" not in net.report(), net.report()
    for n in (2, 5, 9):
        assert_right(net, model, _inputs(model, n, 0))


@pytest.mark.parametrize("name", IMAGES)
def test_any_number_of_images(name: str) -> None:
    torch.manual_seed(0)
    module = IMAGES[name].eval()
    net = ranged(module, torch.randn(2, 3, 40, 36), dims={"input": {0: "B"}, "B": (1, 6)})
    for count in (1, 2, 5, 6):
        x = torch.randn(count, 3, 40, 36)
        found: Any = net(x)
        with torch.no_grad():
            torch.testing.assert_close(found, module(x), rtol=1e-4, atol=1e-5)


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
