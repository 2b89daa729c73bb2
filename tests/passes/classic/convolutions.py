"""Convolutions, batch normalisation and ReLU, with the variants that are usually missed."""

from __future__ import annotations

from typing import Any

from prefuse.tests.passes.classic.case import IMAGE, SEQUENCE, VOLUME, case
from torch import nn
from torch.nn import functional
from torch.nn.functional import relu


def conv(out: int = 4, kernel: int = 3, **options: Any) -> nn.Module:
    return nn.Conv2d(4, out, kernel, padding=kernel // 2, **options)


CONV_BN_RELU = (
    case("plain", lambda m, x: m.relu(m.bn(m.conv(x))), IMAGE, "conv_relu", conv=conv(), bn=nn.BatchNorm2d(4), relu=nn.ReLU()),
    case("residual after", lambda m, x: relu(m.bn(m.conv(x)) + x), IMAGE, "conv_add_relu", conv=conv(), bn=nn.BatchNorm2d(4)),
    case(
        "residual on the left", lambda m, x: relu(x + m.bn(m.conv(x))), IMAGE, "conv_add_relu", conv=conv(), bn=nn.BatchNorm2d(4)
    ),
    case(
        "residual between",
        lambda m, x: relu(m.bn(m.conv(x) + x)),
        IMAGE,
        "conv_add_mul_add_relu",
        conv=conv(),
        bn=nn.BatchNorm2d(4),
    ),
    case(
        "two branches",
        lambda m, x: relu(m.bn(m.conv(x)) + m.other(m.short(x))),
        IMAGE,
        "conv conv_add_relu",
        "Add not fused with Conv: Add follows another anchor",
        conv=conv(),
        bn=nn.BatchNorm2d(4),
        short=conv(kernel=1),
        other=nn.BatchNorm2d(4),
    ),
    case(
        "shared activation",
        lambda m, x: m.relu(m.b2(m.c2(m.relu(m.b1(m.c1(x)))))),
        IMAGE,
        "conv_relu conv_relu",
        c1=conv(),
        b1=nn.BatchNorm2d(4),
        c2=conv(),
        b2=nn.BatchNorm2d(4),
        relu=nn.ReLU(),
    ),
    case(
        "shared layers",
        lambda m, x: m.relu(m.bn(m.conv(m.relu(m.bn(m.conv(x)))))),
        IMAGE,
        "conv_relu conv_relu",
        conv=conv(),
        bn=nn.BatchNorm2d(4),
        relu=nn.ReLU(),
    ),
    case(
        "shared norm",
        lambda m, x: m.relu(m.bn(m.c2(m.relu(m.bn(m.c1(x)))))),
        IMAGE,
        "conv_relu conv_relu",
        c1=conv(),
        c2=conv(),
        bn=nn.BatchNorm2d(4),
        relu=nn.ReLU(),
    ),
    case(
        "two readers of the convolution",
        lambda m, x: (h := m.conv(x), relu(m.bn(h)) * h)[1],
        IMAGE,
        "conv_mul_add_relu_mul",
        "Mul not folded into Conv: %conv2d has 2 readers",
        conv=conv(),
        bn=nn.BatchNorm2d(4),
    ),
    case(
        "two readers of the norm",
        lambda m, x: (h := m.bn(m.conv(x)), relu(h) * h)[1],
        IMAGE,
        "conv_relu_mul",
        conv=conv(),
        bn=nn.BatchNorm2d(4),
    ),
    case(
        "two readers of the activation",
        lambda m, x: (h := relu(m.bn(m.conv(x))), m.c2(h) + h)[1],
        IMAGE,
        "conv_relu conv_add",
        conv=conv(),
        bn=nn.BatchNorm2d(4),
        c2=conv(),
    ),
    case(
        "convolution is an output",
        lambda m, x: (h := m.conv(x), relu(m.bn(h))),
        IMAGE,
        "conv_mul_add_relu",
        "Mul not folded into Conv: %conv2d is an output of the graph",
        conv=conv(),
        bn=nn.BatchNorm2d(4),
    ),
    case(
        "norm is an output",
        lambda m, x: (h := m.bn(m.conv(x)), relu(h)),
        IMAGE,
        "conv_relu",
        "is an output of the graph",
        conv=conv(),
        bn=nn.BatchNorm2d(4),
    ),
    case(
        "transposed",
        lambda m, x: relu(m.bn(m.conv(x))),
        IMAGE,
        "convtranspose_relu",
        conv=nn.ConvTranspose2d(4, 6, 2, stride=2),
        bn=nn.BatchNorm2d(6),
    ),
    case(
        "transposed, groups",
        lambda m, x: relu(m.bn(m.conv(x))),
        IMAGE,
        "convtranspose_relu",
        conv=nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2),
        bn=nn.BatchNorm2d(6),
    ),
    case("groups", lambda m, x: relu(m.bn(m.conv(x))), IMAGE, "conv_relu", conv=conv(6, groups=2), bn=nn.BatchNorm2d(6)),
    case(
        "depthwise",
        lambda m, x: relu(m.bn(m.conv(x))),
        IMAGE,
        "conv_relu",
        conv=conv(8, groups=4, bias=False),
        bn=nn.BatchNorm2d(8),
    ),
    case("1-D", lambda m, x: relu(m.bn(m.conv(x))), SEQUENCE, "conv_relu", conv=nn.Conv1d(4, 6, 3), bn=nn.BatchNorm1d(6)),
    case("3-D", lambda m, x: relu(m.bn(m.conv(x))), VOLUME, "conv_relu", conv=nn.Conv3d(4, 2, 2), bn=nn.BatchNorm3d(2)),
    case("norm first", lambda m, x: relu(m.conv(m.bn(x))), IMAGE, "conv_relu", conv=nn.Conv2d(4, 6, 3), bn=nn.BatchNorm2d(4)),
    case(
        "norm first, padding",
        lambda m, x: relu(m.conv(m.bn(x))),
        IMAGE,
        "mul_add_conv_relu",
        "Add not folded into Conv: its shift does not reach the padding [1, 1, 1, 1]",
        conv=conv(),
        bn=nn.BatchNorm2d(4),
    ),
    case(
        "norm on both sides",
        lambda m, x: relu(m.b2(m.conv(m.b1(x)))),
        IMAGE,
        "conv_relu",
        conv=nn.Conv2d(4, 6, 3, groups=2),
        b1=nn.BatchNorm2d(4),
        b2=nn.BatchNorm2d(6),
    ),
    case("pre-activation", lambda m, x: m.conv(relu(m.bn(x))), IMAGE, "mul_add_relu_conv", conv=conv(), bn=nn.BatchNorm2d(4)),
)
CONV_BN = (
    case("plain", lambda m, x: m.bn(m.conv(x)), IMAGE, "conv", conv=conv(), bn=nn.BatchNorm2d(4)),
    case("residual", lambda m, x: m.bn(m.conv(x)) + x, IMAGE, "conv_add", conv=conv(), bn=nn.BatchNorm2d(4)),
    case(
        "pooling between",
        lambda m, x: m.bn(functional.avg_pool2d(m.conv(x), 2)),
        IMAGE,
        "conv averagepool",
        conv=conv(),
        bn=nn.BatchNorm2d(4),
    ),
    case(
        "largest between",
        lambda m, x: m.bn(functional.max_pool2d(m.conv(x), 2)),
        IMAGE,
        "conv maxpool",
        conv=conv(),
        bn=nn.BatchNorm2d(4),
    ),
    case(
        "largest, negative scale",
        lambda m, x: -functional.max_pool2d(m.conv(x), 2),
        IMAGE,
        "conv maxpool_neg",
        "MaxPool lies between, and a scale is negative",
        conv=conv(),
    ),
    case("broadcast from the right", lambda m, x, y: m.conv(x) * y, (*IMAGE, (4, 1, 1)), "conv_mul", conv=conv()),
    case("broadcast from the left", lambda m, x, y: y + m.conv(x), (*IMAGE, (1,)), "conv_add", conv=conv()),
    case(
        "broadcast to a larger shape",
        lambda m, x, y: m.conv(x) + y,
        (*IMAGE, (2, 1, 1, 1)),
        "conv add",
        "its shape is [2,4,6,6] and that of Conv [1,4,6,6]",
        conv=conv(),
    ),
    case(
        "transposed, 1-D",
        lambda m, x: m.bn(m.conv(x)),
        SEQUENCE,
        "convtranspose",
        conv=nn.ConvTranspose1d(4, 6, 3, groups=2),
        bn=nn.BatchNorm1d(6),
    ),
    case(
        "norm first, transposed",
        lambda m, x: m.conv(m.bn(x)),
        SEQUENCE,
        "mul_add convtranspose",
        "a shift in front of ConvTranspose is not the same everywhere behind it",
        conv=nn.ConvTranspose1d(4, 6, 3),
        bn=nn.BatchNorm1d(4),
    ),
)
BN_RELU = (
    case("plain", lambda m, x: relu(m.bn(x)), IMAGE, "mul_add_relu", bn=nn.BatchNorm2d(4)),
    case("1-D", lambda m, x: relu(m.bn(x)), SEQUENCE, "mul_add_relu", bn=nn.BatchNorm1d(4)),
    case("3-D", lambda m, x: relu(m.bn(x)), VOLUME, "mul_add_relu", bn=nn.BatchNorm3d(4)),
    case("residual", lambda m, x: relu(x + m.bn(x)), IMAGE, "mul_add_add_relu", bn=nn.BatchNorm2d(4)),
    case("shared", lambda m, x: relu(m.bn(relu(m.bn(x)))), IMAGE, "mul_add_relu_mul_add_relu", bn=nn.BatchNorm2d(4)),
    case("two readers", lambda m, x: (h := m.bn(x), relu(h) * h)[1], IMAGE, "mul_add_relu_mul", bn=nn.BatchNorm2d(4)),
    case(
        "norm is an output",
        lambda m, x: (h := m.bn(x), relu(h)),
        IMAGE,
        "mul_add_relu",
        "Relu not fused with Mul: %",
        bn=nn.BatchNorm2d(4),
    ),
    case(
        "after pooling", lambda m, x: relu(m.bn(functional.max_pool2d(x, 2))), IMAGE, "maxpool_mul_add_relu", bn=nn.BatchNorm2d(4)
    ),
)
