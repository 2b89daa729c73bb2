"""Programs for images of any height and width: networks of convolutions in every precision, compared with torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import onnxruntime
import prefuse
import pytest
import torch
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.compiler.programs.symbolic import SymbolicModel
from torch import Tensor, nn

from ..sample import every
from .test_symbolic import assert_right, called, compiled, model_of
from .test_symbolic_operators import OPSET, Applied, inputs_of, ranged


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
    "ceiled": nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.MaxPool2d(3, 2, ceil_mode=True), nn.AvgPool2d(3, 2, 1, ceil_mode=True)),
    "dilated": nn.Sequential(nn.Conv2d(3, 8, 3, 1, 2, dilation=2), nn.MaxPool2d(2), nn.Conv2d(8, 12, 5, bias=False)),
    "grouped": nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1, groups=3), nn.Hardsigmoid()),
}


def own_weights(module: nn.Module) -> nn.Module:
    """The network, with weights that do not depend on what was imported before this file."""
    torch.manual_seed(0)
    own = copy.deepcopy(module)
    for part in own.modules():
        if isinstance(part, nn.modules.conv._ConvNd):
            part.reset_parameters()
    return own.eval()


@pytest.mark.parametrize("name", IMAGES)
def test_images_of_any_size(name: str) -> None:
    module = own_weights(IMAGES[name])
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


@pytest.mark.parametrize(("precision", "name"), every(2, list(product(PRECISIONS, NETS))))
def test_images_of_any_size_in_any_precision(precision: str, name: str) -> None:
    """Kernels channels-last, of Winograd and of pairs are for any size, too, and no layout is turned between them.

    Other nets in other precisions tomorrow.
    """
    module = own_weights(NETS[name])
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
    model = model_of(f"<{OPSET}> main {body}")
    net = compiled(model, dims={"N": (2, 9)})
    assert "specialised" not in net.report(), net.report()
    for n in (2, 5, 9):
        assert_right(net, model, inputs_of(model, n, 0))


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


def _crossed(x: Tensor) -> Tensor:
    """Products of channels over all positions: their depth is two sizes of a call."""
    rows = x.flatten(2)
    return (rows @ rows.transpose(1, 2)).softmax(-1) @ rows


POSITIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "products of channels": _crossed,
    "a pool to one": lambda x: nn.functional.adaptive_max_pool2d(x, 1),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_images_whose_positions_are_one_dimension(name: str) -> None:
    module = Applied(POSITIONS[name])
    net = prefuse.compile(
        module, torch.randn(2, 9, 30, 24), dims={"input": {2: (21, 60, 3), 3: (6, 48, 6)}}, cache=False, threads=2
    )
    for height, width in ((21, 6), (33, 48), (60, 24)):
        x = torch.randn(2, 9, height, width)
        torch.testing.assert_close(net(x), module(x), rtol=1e-4, atol=1e-5)


def test_sizes_that_a_module_cannot_have_are_told() -> None:
    module = nn.Conv2d(3, 4, 9)
    with pytest.raises(prefuse.CompileError, match=r"input_2 = \d.*holds: dims=\{.input_2.: \((9|1\d), 40\)\}"):
        prefuse.compile(module, torch.randn(1, 3, 20, 20), dims={"input": {2: (4, 40)}}, cache=False)


SAME = {
    "strided": ('y = Conv <auto_pad = "SAME_UPPER", strides = [2, 2], kernel_shape = [3, 3]> (x, v)', {"v": (16, 3, 3, 3)}),
    "lower": ('y = Conv <auto_pad = "SAME_LOWER", strides = [2, 3], kernel_shape = [5, 4]> (x, v)', {"v": (16, 3, 5, 4)}),
    "mobile": (
        """a = Conv <auto_pad = "SAME_UPPER", strides = [2, 2], kernel_shape = [3, 3]> (x, v)
        b = Relu(a)
        c = Conv <auto_pad = "SAME_UPPER", strides = [2, 2], kernel_shape = [3, 3], group = 16> (b, w)
        d = MaxPool <auto_pad = "SAME_UPPER", kernel_shape = [3, 3], strides = [2, 2]> (c)
        y = Conv <auto_pad = "SAME_UPPER", kernel_shape = [1, 1]> (d, u)""",
        {"v": (16, 3, 3, 3), "w": (16, 1, 3, 3), "u": (8, 16, 1, 1)},
    ),
}


@pytest.mark.parametrize("sizes", ["any", "multiples"])
@pytest.mark.parametrize("name", SAME)
def test_as_many_zeros_as_lengths_need(name: str, sizes: str) -> None:
    """As TensorFlow pads: of odd and even lengths by another number of zeros, and one program serves both."""
    body, weights = SAME[name]
    model = model_of(f"<{OPSET}> main (float[1,3,H,W] x) => (float[1,C,A,B] y) {{ {body} }}", weights)
    dims = {"H": (9, 60), "W": (11, 40)} if sizes == "any" else {"H": (16, 64, 16), "W": (16, 32, 16)}
    net = compiled(model, dims=dims)
    assert "specialised" not in net.report(), net.report()
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for height, width in ((9, 11), (16, 33), (60, 40), (33, 16)) if sizes == "any" else ((16, 16), (48, 32), (64, 16)):
        x = np.random.default_rng(height).standard_normal((1, 3, height, width)).astype(np.float32)
        np.testing.assert_allclose(called(net, x), session.run(None, {"x": x})[0], rtol=1e-4, atol=1e-5)
