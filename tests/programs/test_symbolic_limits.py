"""Models for ranges of sizes where some sizes are impossible, too large, or not those of each other: right, or refused."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import onnx
import prefuse
import pytest
import torch
from prefuse.compiler.programs.symbolic import SymbolicModel
from prefuse.runtime.errors import CompileError, InputError, OptionError
from prefuse.runtime.signature import SizedSignature

from .test_symbolic import assert_right, compiled, model_of

OPSET = 'ir_version: 10, opset_import: ["": 20]'


def ranged(text: str, **dims: tuple[int, ...]) -> tuple[onnx.ModelProto, SymbolicModel]:
    model = model_of(f"<{OPSET}> main {text}")
    return model, compiled(model, dims=dims)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    "of",
    [
        "cube = Mul(square, n) found = Sub(cube, n)",  # as of Spearman's correlation
        "cube = Mul(square, n) k = Constant<value_int=7>() found = Div(cube, k)",
        "cube = Mul(square, n) k = Constant<value_int=1000003>() found = Mod(cube, k)",
        "cube = Mul(square, n) k = Constant<value_int=5000000000>() found = Min(cube, k)",
        "cube = Mul(square, n) k = Constant<value_int=-5000000000>() m = Neg(cube) found = Max(m, k)",
    ],
)
def test_sizes_that_are_data_have_64_bits(of: str) -> None:
    model, net = ranged(
        f"""(float[N] x) => (float[N] y) {{
            shape = Shape(x) n = Squeeze(shape) square = Mul(n, n) {of}
            divisor = Cast<to=1>(found) y = Div(x, divisor) }}""",
        N=(2, 4096),
    )
    assert "specialised" not in net.report(), net.report()
    for size in (2, 33, 1290, 1291, 2000, 4096):
        assert_right(net, model, {"x": floats(size) * 1e9}, 1e-5)


def test_a_range_from_a_large_size_on() -> None:
    model, net = ranged(
        """(float[N] x) => (int64[N] y) {
            shape = Shape(x) n = Squeeze(shape) square = Mul(n, n) cube = Mul(square, n)
            one = Constant<value_int=1>() end = Add(cube, n) z = Range(cube, end, one) y = Mul(z, one) }""",
        N=(2, 4096),
    )
    for size in (2, 2000, 4096):
        assert_right(net, model, {"x": floats(size)})


def test_results_are_never_of_negative_sizes() -> None:
    _, net = ranged(
        "(float[N,3] x) => (float[M,3] y) { p = Constant<value_ints=[-2,0,-2,0]>() y = Pad(x, p) }",
        N=(1, 64),
    )
    for size in (5, 30, 64):  # the reference knows no pads below zero
        x = floats(size, 3)
        np.testing.assert_array_equal(np.asarray(net(x)), x[2:-2])
    with pytest.raises(CompileError, match=r"\[-2, 3\], with a negative dimension"):
        net(floats(2, 3))


def test_windows_larger_than_some_images() -> None:
    model, net = ranged(
        """(float[1,3,H,W] x) => (float[1,3,1,1] y) {
            p = MaxPool<kernel_shape=[5,5]>(x) y = GlobalAveragePool(p) }""",
        H=(1, 32),
        W=(1, 32),
    )
    for height, width in ((32, 32), (5, 32), (17, 6)):
        assert_right(net, model, {"x": floats(1, 3, height, width)})
    with pytest.raises(CompileError, match=r"\[1, 3, -2, -2\], with a negative dimension"):
        net(floats(1, 3, 2, 2))


def test_a_reshape_whose_open_extent_is_by_a_size_that_may_be_zero() -> None:
    model = model_of(
        f"""<{OPSET}> main (float[1,1,T,80] x) => (float[1,A,B] y) {{
            c = Conv<kernel_shape=[3,3], strides=[2,2]>(x, w) t = Transpose<perm=[0,2,1,3]>(c)
            s = Constant<value_ints=[0,0,-1]>() y = Reshape(t, s) }}""",
        {"w": (4, 1, 3, 3)},
    )
    net = compiled(model, dims={"T": (1, 300)})
    for size in (3, 40, 300):
        assert_right(net, model, {"x": floats(1, 1, size, 80)})


@pytest.mark.parametrize(
    ("text", "inputs", "wrong"),
    [
        (
            "(float[T,N,4] x, int64[M] l) => (float[T,N,4] y) { y = ReverseSequence(x, l) }",
            {"x": (6, 4, 4), "l": (4,)},
            {"x": (6, 4, 4), "l": (3,)},
        ),
        (
            "(float[N,4] x, int64[M,4] i) => (float[M,4] y) { y = GatherElements<axis=1>(x, i) }",
            {"x": (6, 4), "i": (6, 4)},
            {"x": (4, 4), "i": (7, 4)},
        ),
        (
            "(float[N,4] x, int64[M,4] i, float[T,4] u) => (float[N,4] y) { y = ScatterElements<axis=1>(x, i, u) }",
            {"x": (6, 4), "i": (4, 4), "u": (4, 4)},
            {"x": (6, 4), "i": (4, 4), "u": (3, 4)},
        ),
        (
            "(float[N,4,T] x, float[M] s, float[M] b) => (float[N,4,T] y) { y = InstanceNormalization(x, s, b) }",
            {"x": (6, 4, 8), "s": (4,), "b": (4,)},
            {"x": (6, 4, 8), "s": (3,), "b": (3,)},
        ),
    ],
)
def test_sizes_that_should_be_those_of_each_other(
    text: str, inputs: dict[str, tuple[int, ...]], wrong: dict[str, tuple[int, ...]]
) -> None:
    """No kernel may read as many elements of one operand as another one has."""
    _, types = text.split("(")[0], text.split(")")[0]
    names = {name for name in "NMT" if f"[{name}" in types or f",{name}" in types}
    model, net = ranged(text, **dict.fromkeys(names, (2, 8)))
    assert "specialised" in net.report()

    def given(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        indices = {"l": np.ones, "i": np.zeros}
        return {name: indices[name](shape, np.int64) if name in indices else floats(*shape) for name, shape in shapes.items()}

    assert_right(net, model, given(inputs), 1e-4)
    with pytest.raises(CompileError, match=r"(is|are) asked for|beyond its data"):
        net(**given(wrong))


def test_states_of_a_recurrence_that_are_not_those_of_its_batch() -> None:
    model = model_of(
        f"""<{OPSET}> main (float[T,N,4] x, float[1,M,8] h) => (float[T,1,N,8] y) {{
            y = GRU<hidden_size=8>(x, w, r, "", "", h) }}""",
        {"w": (1, 24, 4), "r": (1, 24, 8)},
    )
    net = compiled(model, dims={"T": (2, 8), "N": (2, 4), "M": (2, 4)})
    assert_right(net, model, {"x": floats(5, 3, 4), "h": floats(1, 3, 8)}, 1e-4)
    with pytest.raises(CompileError, match="initial_h"):
        net(floats(5, 3, 4), floats(1, 2, 8))


@pytest.mark.parametrize("operator", ["Max", "Min"])
def test_the_greatest_of_three_sizes(operator: str) -> None:
    model, net = ranged(
        f"""(float[N] x, float[M] z) => (float[K] y) {{
            n = Shape(x) m = Shape(z) four = Constant<value_ints=[4]>() k = {operator}(n, four, m)
            zeros = ConstantOfShape(k) y = Exp(zeros) }}""",
        N=(2, 8),
        M=(2, 8),
    )
    for n, m in ((2, 8), (8, 2), (3, 3)):
        assert_right(net, model, {"x": floats(n), "z": floats(m)})


def test_a_size_that_is_repeated_many_times() -> None:
    model, net = ranged(
        """(float[N] x) => (float[1000,1000] y) {
            n = Shape(x) s = Constant<value_ints=[1000,1000]>() many = Expand(n, s) y = Cast<to=1>(many) }""",
        N=(2, 64),
    )
    assert "specialised" not in net.report(), net.report()
    assert_right(net, model, {"x": floats(7)})


def test_a_call_waits_for_no_compilation_for_other_sizes() -> None:
    model, net = ranged("(float[N,8] x) => (float[N,8] y) { y = Exp(x) }", N=(2, 64))
    source: Any = net._ranges
    results: list[object] = []
    with source._building:
        call = threading.Thread(target=lambda: results.append(net(floats(9, 8))), daemon=True)
        call.start()
        call.join(60)
        assert results, "it waits"
    assert_right(net, model, {"x": floats(9, 8)})


def test_results_of_many_sizes_are_not_kept() -> None:
    _, net = ranged("(float[N,8] x) => (float[N,8] y) { y = Exp(x) }", N=(2, 64))
    x = torch.ones(9, 8)
    program: Any = net.specialize(x)
    signature = SizedSignature(program.plan, frozenset()).at([x])
    assert signature.outputs[0].new_tensor([], None).shape == (9, 8)
    assert signature.outputs[0]._pattern is None


class Parity(torch.nn.Module):
    """Of an even number of rows it makes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] % 2 == 0 else x * 3


def test_what_an_exported_program_assumes_is_checked_at_each_call(tmp_path: Any) -> None:
    program = torch.export.export(Parity(), (torch.randn(4, 3),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    net: Any = prefuse.compile(program, cache=False)
    for rows in (4, 6):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(net(x), x * 2)
    with pytest.raises(InputError, match=r"x\.shape\[0\]"):
        net(torch.randn(5, 3))
    name = next(str(dim) for dim in program.graph_signature.user_inputs)
    ranged_net: Any = prefuse.compile(program, dims={name: {0: (2, 9)}}, cache=False)
    with pytest.raises(InputError, match=r"x\.shape\[0\]"):
        ranged_net(torch.randn(5, 3))
    with pytest.raises(OptionError, match="holds only where"):
        ranged_net.save(tmp_path / "net.prefuse")


class Wide(torch.nn.Module):
    """Of many rows that are wide it makes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] * x.shape[1] < 30_000 else x * 3


@pytest.mark.parametrize(("module", "last"), [(Parity(), 3), (Wide(), 8)])
def test_what_an_exported_program_assumes_is_checked_at_all_sizes_before_it_is_saved(
    module: torch.nn.Module, last: int, tmp_path: Any
) -> None:
    """It does not hold for the last of many sizes alone."""
    free = torch.export.Dim.AUTO
    program = torch.export.export(module, (torch.randn(4, 30),), dynamic_shapes=({0: free, 1: free},))
    (name,) = program.graph_signature.user_inputs

    def saved(rows: tuple[int, int]) -> None:
        net: Any = prefuse.compile(program, dims={str(name): {0: rows, 1: (3, 4000)}}, cache=False)
        net.save(tmp_path / "net.prefuse")

    with pytest.raises(OptionError, match="holds only where"):
        saved((2, last))
    saved((2, 2))


def test_a_range_of_an_exported_program_is_checked_at_all_sizes(tmp_path: Any) -> None:
    """That of the dimension which changes least from one point to the next."""
    rows = torch.export.Dim("rows", min=2, max=4)
    program = torch.export.export(torch.nn.ReLU(), (torch.randn(3, 9),), dynamic_shapes=({0: rows, 1: torch.export.Dim.AUTO},))
    (name,) = program.graph_signature.user_inputs
    net: Any = prefuse.compile(program, dims={str(name): {0: (2, 5), 1: (3, 4000)}}, cache=False)
    with pytest.raises(OptionError, match="for 2 to 4, not for 5"):
        net.save(tmp_path / "net.prefuse")


def test_ranges_and_multiples_of_an_exported_program() -> None:
    rows = torch.export.Dim("rows", min=3, max=16)

    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.repeat(2, 1) + y

    given = torch.randn(4, 3), torch.randn(8, 3)
    program = torch.export.export(Sum(), given, dynamic_shapes=({0: rows}, {0: 2 * rows}))
    net: Any = prefuse.compile(program, cache=False)
    for count in (3, 5, 16):
        x, y = torch.randn(count, 3), torch.randn(2 * count, 3)
        torch.testing.assert_close(net(x, y), x.repeat(2, 1) + y)
    for x, y in ((torch.randn(17, 3), torch.randn(34, 3)), (torch.randn(5, 3), torch.randn(9, 3))):
        with pytest.raises(InputError, match=r"shape\[0\]"):
            net(x, y)


def test_a_file_of_one_range_answers_for_nothing(tmp_path: Any) -> None:
    _, net = ranged("(float[N,8] x) => (float[N,8] y) { y = Exp(x) }", N=(33, 40))
    assert len(net.programs) <= 1
    net.save(tmp_path / "net.prefuse")
    loaded: Any = prefuse.load(tmp_path / "net.prefuse")
    np.testing.assert_array_equal(loaded(floats(35, 8)), net(floats(35, 8)))
    assert net(floats(0, 8)).shape == loaded(floats(0, 8)).shape == (0, 8)  # type: ignore[attr-defined]
