"""Poolings of values that lie channels-last; against torch in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as nest

import numpy as np
import pytest
import torch
from prefuse.kernels.groups.group import Group, Op
from torch.nn import functional

from ..convolution.channels_last_cases import BFLOAT16, channels_last, padded, pooling
from ..harness import LEVELS, Case, check, check_in_turn, target_of, type_of


def poolings() -> list[Case]:
    return [
        pooling("MaxPool", (1, 64, 13, 13), kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
        pooling("MaxPool", (2, 17, 9, 8), kernel_shape=(2, 2), strides=(2, 2)),
        pooling("MaxPool", (1, 3, 9, 12), kernel_shape=(3, 2), dilations=(2, 3), pads=(2, 1, 0, 2)),
        pooling("MaxPool", (1, 1, 5, 5), kernel_shape=(5, 5)),
        pooling("AveragePool", (2, 17, 9, 11), kernel_shape=(3, 3), strides=(2, 1), pads=(0, 1, 2, 1)),
        pooling("AveragePool", (1, 33, 8, 8), kernel_shape=(3, 3), pads=(1, 1, 1, 1), count_include_pad=1),
        pooling("AveragePool", (1, 40, 6, 6), kernel_shape=(2, 3)),
        pooling("AveragePool", (1, 20, 13, 15), kernel_shape=(11, 12), strides=(1, 2)),
        pooling("MaxPool", (2, 20, 14, 15), kernel_shape=(13, 13), pads=(6, 6, 6, 6), strides=(3, 2)),
        pooling("MaxPool", (2, 20, 15), kernel_shape=(3,), strides=(2,), pads=(1, 0)),
        pooling("AveragePool", (1, 17, 14), kernel_shape=(4,), strides=(3,), pads=(1, 2)),
        pooling("MaxPool", (1, 20, 5, 6, 7), kernel_shape=(3, 2, 3), strides=(2, 2, 1), pads=(1, 0, 1, 1, 1, 1)),
        pooling("AveragePool", (2, 17, 4, 5, 6), kernel_shape=(2, 3, 3), strides=(1, 2, 2), pads=(0, 1, 1, 1, 0, 1)),
    ]


@pytest.mark.parametrize("level", LEVELS)
def test_poolings(level: str) -> None:
    check_in_turn(poolings(), level)


@pytest.mark.parametrize("level", LEVELS)
def test_greatest_of_bfloat16(level: str) -> None:
    """All numbers keep their order as integers, infinities and those of padding too; NaN of either sign are the greatest."""
    generator, cases = np.random.default_rng(0), []
    for channels, pads in ((37, (1, 1, 1, 1)), (64, (0, 0, 0, 0))):
        bits = generator.integers(0, 1 << 16, (1, channels, 9, 10), "uint16")
        bits = np.where(bits & 0x7F80 == 0x7F80, bits & 0xFFC0, bits)  # infinities, and quiet NaN
        bits[0, 0, :4, :4] = 0xFF80  # -infinity
        bits[0, 1, :4, :4], bits[0, 1, 0, 0] = 0x8001, 0xFFC1  # the least denormal numbers, and a negative NaN
        x = bits.view(BFLOAT16)
        with np.errstate(invalid="ignore"):
            wide = x.astype(np.float32)
        exact = functional.max_pool2d(padded(torch.from_numpy(wide), pads, -np.inf), 3, 2).numpy()
        kernel = {"kernel_shape": (3, 3), "strides": (2, 2), "pads": pads}
        ops = (Op("Cast", ("x",), (".x",), {"to": 1}), Op("MaxPool", (".x",), ("y",), kernel))
        types = {"x": type_of(x), ".x": type_of(wide), "y": type_of(exact)}
        case = Case(Group(ops, ("x",), ("y",), types), {"x": x}, [exact], 0.0, 0.0, "MaxPool of all numbers", "pooling")
        cases.append(channels_last(case, template="pooling_channels_last"))
    check_in_turn(cases, level)


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
def test_poolings_of_bfloat16(op_type: str) -> None:
    """They read images as they lie, for results in float32 and rounded ones, in either layout; and poolings that are in bfloat16
    themselves."""
    cases = []
    for rank, result in nest((2, 3), ("float32", "bfloat16")):
        x = np.random.default_rng(0).standard_normal((2, 37, 9, 8, 5)[: rank + 2]).astype(BFLOAT16)
        pool = getattr(functional, f"{'max' if op_type == 'MaxPool' else 'avg'}_pool{rank}d")
        exact = pool(torch.from_numpy(x.astype(np.float64)), 2, 2).numpy()
        names = ("y",) if result == "float32" else (".y", "y")
        anchor = Op(op_type, (".x",), names[:1], {"kernel_shape": (2,) * rank, "strides": (2,) * rank})
        ops = (
            Op("Cast", ("x",), (".x",), {"to": 1}),
            anchor,
            *([Op("Cast", names, ("y",), {"to": 16})] if len(names) > 1 else []),
        )
        ops = tuple(replace(op, inputs=op.inputs[:1]) for op in ops)
        wide = replace(type_of(x), dtype="float32")
        types = {"x": type_of(x), ".x": wide, ".y": replace(wide, shape=exact.shape)}
        types["y"] = replace(types[".y"], dtype=result)
        unit = 0.0 if op_type == "MaxPool" else 2.0**-8 if result == "bfloat16" else 1e-6
        case = Case(Group(ops, ("x",), ("y",), types), {"x": x}, [exact], unit, unit / 10, f"{op_type} {result}", "pooling")
        cases += [case, channels_last(case, template="pooling_channels_last")]
        if result == "bfloat16":
            itself = Group((replace(anchor, inputs=("x",), outputs=("y",)),), ("x",), ("y",), {"x": types["x"], "y": types["y"]})
            case = Case(itself, {"x": x}, [exact], unit, unit / 10, f"{op_type} in bfloat16", "pooling")
            cases += [case, channels_last(case, template="pooling_channels_last")]
    check(cases, target_of("avx2"))
