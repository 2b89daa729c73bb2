"""`prefuse.compile` as users see it."""

import dataclasses
import importlib
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import prefuse
import pytest
import torch
from onnx import parser
from prefuse.compiler.programs.options import parse_options
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.runtime.errors import CompileError, InputError, InvalidModelError, OptionError
from prefuse.runtime.executor import CompiledModel
from torch import nn

STATIC = """<ir_version: 8, opset_import: ["": 18]> main (float[2,4] x, float[4] b) => (float[2,4] y, float[2,4] z) {
  z = Add(x, b)
  y = Relu(z)
}"""
DYNAMIC = """<ir_version: 8, opset_import: ["": 18]> main (float[N,4] x, float[4] b) => (float[N,4] y) {
  z = Add(x, b)
  y = Relu(z)
}"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@dataclasses.dataclass
class Result:
    scaled: torch.Tensor
    parts: tuple[torch.Tensor, object]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, -2.0, 3.0, 4.0]))

    def forward(self, x, shift=None, times: int = 1, *, relu=False):  # type: ignore[no-untyped-def]
        y = x * self.scale * times
        if shift is not None:
            y = y + shift
        if relu:
            y = y.relu()
        return Result(y, (-x, times))


def arrays() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(2, 4)).astype(np.float32), generator.normal(size=4).astype(np.float32)


def test_a_static_onnx_model_is_compiled_at_once(cache: Path) -> None:
    net: Any = prefuse.compile(parser.parse_model(STATIC), cache=cache)
    x, b = arrays()
    for y, z in (net(x, b), net(b=b, x=x), net.context()(x, b=b)):
        np.testing.assert_array_equal(z, x + b)
        np.testing.assert_array_equal(y, np.maximum(x + b, 0))
    assert isinstance(net, CompiledModel)


def test_saving_and_loading(cache: Path, tmp_path: Path) -> None:
    net = prefuse.compile(parser.parse_model(STATIC), cache=cache, name="adder")
    net.save(tmp_path / "m.prefuse")
    again = prefuse.load(tmp_path / "m.prefuse")
    assert again.plan == net.plan
    assert "adder" in again.report()
    np.testing.assert_array_equal(again(*arrays()), net(*arrays()))


def test_numbers_for_inputs_without_dimensions() -> None:
    text = '<ir_version: 10, opset_import: ["": 21]> main (float[N] x, float a) => (float[N] y) { y = Mul(x, a) }'
    net = prefuse.compile(parser.parse_model(text), cache=False)
    assert isinstance(net, SpecializedModel)
    np.testing.assert_array_equal(net(np.ones(3, np.float32), 2.5), np.full(3, 2.5, np.float32))
    with pytest.raises(InputError, match="input a: str given"):
        net(np.ones(3, np.float32), "2.5")


def test_symbolic_dimensions_compile_once_a_shape(cache: Path) -> None:
    net = prefuse.compile(parser.parse_model(DYNAMIC), cache=cache)
    assert isinstance(net, SpecializedModel)
    _, b = arrays()
    for size in (1, 3, 1):
        x = np.full((size, 4), 0.5, np.float32)
        np.testing.assert_array_equal(net(x, b), np.maximum(x + b, 0))
        np.testing.assert_array_equal(net.context()(b=b, x=x), np.maximum(x + b, 0))
    assert net.specialize(x, b) is net.specialize(x, b)
    with pytest.raises(OptionError, match="2 specialisations"):
        _ = net.plan


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda net, x, b: net(x), "b not given"),
        (lambda net, x, b: net({"x": x, "b": b}), "b not given; give a dictionary of inputs as model"),
        (lambda net, x, b: net([x, b]), "b not given; give a list of inputs as model"),
        (lambda net, x, b: net(x, b, b), "3 given"),
        (lambda net, x, b: net(x, bb=b), "did you mean 'b'"),
        (lambda net, x, b: net(x.astype(np.float64), b), "float64"),
        (lambda net, x, b: net(x[0], b), "rank 1|dimensions"),
        (lambda net, x, b: net(x[:, :3], b), "dimension 1 must be 4|compile the model for this shape"),
        (lambda net, x, b: net(x.tolist(), b), "list"),
    ],
)
@pytest.mark.parametrize("text", [STATIC, DYNAMIC])
def test_calls_that_do_not_fit(cache: Path, text: str, call, message: str) -> None:  # type: ignore[no-untyped-def]
    net = prefuse.compile(parser.parse_model(text), cache=cache)
    with pytest.raises(InputError, match=message):
        call(net, *arrays())


def test_a_module_gives_its_own_structure(cache: Path) -> None:
    module = Scaled().eval()
    net = prefuse.compile(module, cache=cache)
    x = torch.randn(2, 4)
    found, expected = net(x), module(x)
    assert isinstance(found, Result)
    torch.testing.assert_close(found.scaled, expected.scaled)
    torch.testing.assert_close(found.parts[0], -x)
    assert found.parts[1] == 1


def test_a_module_is_compiled_once_a_signature(cache: Path) -> None:
    module = Scaled().eval()
    net: Any = prefuse.compile(module, cache=cache)
    x, shift = torch.randn(2, 4), torch.tensor(5.0)
    calls: list[tuple[Any, Any]] = [
        ((x,), {}),
        ((x, shift), {}),
        ((x,), {"shift": shift, "times": 3}),
        ((x, None, 3), {"relu": True}),
    ]
    for args, kwargs in calls:
        torch.testing.assert_close(net(*args, **kwargs).scaled, module(*args, **kwargs).scaled)
        torch.testing.assert_close(net.context()(*args, **kwargs).scaled, module(*args, **kwargs).scaled)
    assert net.specialize(x, shift) is net.specialize(x, shift=shift)
    assert net.specialize(x, times=1) is not net.specialize(x, times=True)


def test_a_module_computes_under_autocast_where_it_is_called(cache: Path) -> None:
    """The types of the first call were those of all calls, also of those of another process."""
    x = torch.randn(3, 4)
    for _ in range(2):
        net = prefuse.compile(torch.nn.Linear(4, 5), cache=cache)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                inside = net(x)
            outside = net(x)
            assert isinstance(inside, torch.Tensor)
            assert isinstance(outside, torch.Tensor)
            assert (inside.dtype, outside.dtype) == (torch.bfloat16, torch.float32)


def test_numpy_in_numpy_out_for_a_module(cache: Path) -> None:
    net = prefuse.compile(Scaled(), cache=cache)
    x, _ = arrays()
    found = net(x)
    assert isinstance(found, Result)
    assert isinstance(found.scaled, np.ndarray)
    np.testing.assert_allclose(found.scaled, x * np.array([1, -2, 3, 4], np.float32))


def test_example_inputs_compile_a_module_at_once(cache: Path, tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    net = prefuse.compile(Scaled(), args=(x,), kwargs={"relu": True}, cache=cache)
    assert [port.name for port in net.inputs] == ["x"]
    assert (net.input_names, net.output_names) == (("x",), tuple(port.name for port in net.outputs))
    assert isinstance(net, prefuse.SpecializedModel)
    (program,) = net.programs
    assert net.remarks == tuple(dict.fromkeys(program.remarks))
    net.save(tmp_path / "m.prefuse")
    again: Any = prefuse.load(tmp_path / "m.prefuse")
    scaled, _ = again(x)
    torch.testing.assert_close(scaled, Scaled()(x, relu=True).scaled)


def test_a_module_before_its_first_call(cache: Path) -> None:
    net = prefuse.compile(Scaled(), cache=cache)
    assert "not compiled yet" in net.report()
    with pytest.raises(OptionError, match="not compiled yet"):
        _ = net.plan


def test_a_module_called_wrongly(cache: Path) -> None:
    net = prefuse.compile(Scaled(), cache=cache)
    with pytest.raises(InputError, match="missing a required argument: 'x'"):
        net()
    with pytest.raises(InputError, match="neither a tensor"):
        net(object())


def test_exported_programs(cache: Path) -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    module = nn.ReLU()
    program = torch.export.export(module, (torch.randn(4, 3),), dynamic_shapes=({0: batch},), strict=False)
    net = prefuse.compile(program, cache=cache)
    for size in (2, 5):
        x = torch.randn(size, 3)
        torch.testing.assert_close(net(x), module(x))


def test_threads_share_one_compilation(tmp_path: Path) -> None:
    stages: list[str] = []
    net = prefuse.compile(Scaled(), cache=tmp_path, progress=lambda stage, fraction: stages.append(stage))
    x = torch.randn(3, 4)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(net(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert stages.count("export") == 1


def test_specialisations_in_memory_are_bounded(cache: Path, tmp_path: Path) -> None:
    net = prefuse.compile(parser.parse_model(DYNAMIC), cache=cache)
    assert isinstance(net, SpecializedModel)
    small = SpecializedModel(net._source, capacity=2)
    _, b = arrays()
    first = small.specialize(np.ones((1, 4), np.float32), b)
    for size in (2, 3):
        small(np.ones((size, 4), np.float32), b)
    with pytest.warns(UserWarning, match="1 programs of earlier calls are not saved"):
        small.save(tmp_path / "two.prefuse")
    assert small.specialize(np.ones((1, 4), np.float32), b) is not first


def test_a_failed_compilation_can_be_tried_again(cache: Path) -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise ValueError("not yet")
            return x + 1

    module = Picky()
    net = prefuse.compile(module, cache=cache)
    x = torch.ones(2)
    with pytest.raises(CompileError, match="not yet"):
        net(x)
    module.fails = False
    torch.testing.assert_close(net(x), x + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipelin": "x"}, "did you mean 'pipeline'"),
        ({"quality": 1e-2}, "unknown option"),
        ({"max_error": 1e-2}, 'use precision="mixed", or leave it out'),
        ({"target": "cpuu"}, "unknown target"),
        ({"target": 3}, "not a string"),
        ({"precision": "float3"}, "did you mean 'float32'"),
        ({"threads": 0}, "threads"),
        ({"threads": "two"}, "whole number"),
        ({"pipeline": "canonicalise"}, "did you mean 'canonicalize'"),
        ({"name": ""}, "name"),
        ({"cache": 3}, "neither a folder"),
        ({"progress": 3}, "cannot be called"),
        ({"kwargs": 3}, "no dictionary"),
        ({"args": object()}, "positional inputs"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        prefuse.compile(parser.parse_model(STATIC), **options)  # type: ignore[arg-type]  # wrong on purpose


def test_arguments_are_no_options() -> None:
    with pytest.raises(OptionError, match="states: is no option here; leave it out"):
        parse_options("cpu", "float32", {"states": {}})


def test_whole_numbers_may_be_those_of_numpy() -> None:
    numbers = {"threads": 2, "memory_limit": 1 << 20}
    found = parse_options("cpu", "float32", {name: np.int64(number) for name, number in numbers.items()})
    assert found == parse_options("cpu", "float32", numbers)
    model = parser.parse_model(DYNAMIC)
    net = prefuse.compile(model, dims={"N": (np.int64(1), np.int32(3))}, cache=False)
    assert "sizes N=2..3" in net.report()
    for threads in (np.True_, np.float64(2), np.array([2])):
        with pytest.raises(OptionError, match="whole number"):
            parse_options("cpu", "float32", {"threads": threads})


def test_models_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match="no such file"):
        prefuse.compile(tmp_path / "absent.onnx")
    with pytest.raises(OptionError, match="is no model"):
        prefuse.compile(object())


def test_a_cache_that_cannot_be_used_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            net = prefuse.compile(parser.parse_model(STATIC), cache=tmp_path / "file" / "cache")
            net(*arrays())
    assert sum("cache" in str(one.message) for one in caught) == 1


def _run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_is_light() -> None:
    program = "import sys, prefuse; print([m for m in ('numpy', 'torch', 'tvm', 'onnx', 'onnx_ir') if m in sys.modules])"
    assert _run(program) == "[]"


def test_everything_exported_is_there() -> None:
    assert [name for name in prefuse.__all__ if getattr(prefuse, name, None) is None] == []
    with pytest.raises(AttributeError, match="no attribute 'compiled'"):
        getattr(prefuse, "compiled")  # noqa: B009  # mypy knows that it is not there


def test_a_second_process_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(parser.parse_model(STATIC), tmp_path / "m.onnx")
    (tmp_path / "network.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return {'y': torch.relu(x) + 1}\n"
    )
    program = f"""
import sys, numpy as np
sys.path.insert(0, {str(tmp_path)!r})
import torch, network, prefuse
net = prefuse.compile({str(tmp_path / "m.onnx")!r})
net(np.ones((2, 4), np.float32), np.ones(4, np.float32))
assert prefuse.compile(network.Net())(-torch.ones(3))["y"].tolist() == [1, 1, 1]
print([m for m in ("tvm", "onnxscript") if m in sys.modules])
"""
    monkeypatch.setenv("PREFUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    prefuse.compile(tmp_path / "m.onnx")(*arrays())
    prefuse.compile(importlib.import_module("network").Net())(-torch.ones(3))
    assert _run(program) == "[]"


def test_a_file_seen_before_is_not_parsed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = parser.parse_model(STATIC.replace("float[4] b) =>", "float[4] c) =>"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "b"))
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    program = f"""
import sys, numpy as np, prefuse
x = np.zeros((2, 4), np.float32)
y, z = prefuse.compile({str(path)!r})(x, x[0])
print(z[0, 0], [m for m in ("onnx", "tvm") if m in sys.modules])
"""
    monkeypatch.setenv("PREFUSE_CACHE", str(tmp_path / "cache"))
    x = np.zeros((2, 4), np.float32)

    def sums() -> set[float]:
        return set(np.asarray(prefuse.compile(path)(x, x[0])[1]).flat)  # type: ignore[index]

    assert sums() == {1}
    assert _run(program) == "1.0 []"
    (tmp_path / "weights.bin").write_bytes(np.full(4, 2, np.float32).tobytes())
    assert sums() == {2}
    assert _run(program) == "2.0 []"


class Weighted(torch.nn.Module):
    """Its inputs matter by their place."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, *, z: torch.Tensor, scale: float = 1.0) -> dict[str, object]:
        return {"sum": x + 10 * y + 100 * z, "parts": (x, [scale * y])}


def test_calls_by_name_find_their_program_whatever_their_order() -> None:
    """A second call with the same types goes by a shortcut, which knows where each input belongs."""
    net = prefuse.compile(Weighted(), cache=False)
    one, two, three = (torch.full((4,), float(value)) for value in (1, 2, 3))

    def total(*inputs: torch.Tensor, **named: object) -> float:
        found = net(*inputs, **named)
        assert list(found) == ["sum", "parts"]  # type: ignore[call-overload]
        return float(found["sum"][0])  # type: ignore[index]

    for _ in range(2):
        assert total(one, z=three, y=two) == total(y=two, x=one, z=three) == total(one, two, z=three) == 321
        assert total(two, z=three, y=one) == total(z=three, y=one, x=two) == 312
    for _ in range(2):
        assert total(one, z=one, y=one) == total(z=one, x=one, y=one) == 111  # the same tensor: which is which is not told
        assert total(one, z=three, y=two) == 321
        assert total(z=three, x=one, y=two) == 321
        assert net(one, two, z=three, scale=2.0)["parts"][1][0][0] == 4  # type: ignore[index]
        assert net(one, two, z=three)["parts"][1][0][0] == 2  # type: ignore[index]


def test_the_same_tensor_twice() -> None:
    class Difference(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x - y

    one, two = torch.ones(3), torch.full((3,), 2.0)
    for first in ({"args": (one, one), "named": {}}, {"args": (), "named": {"y": one, "x": one}}):
        net = prefuse.compile(Difference(), cache=False)
        assert float(net(*first["args"], **first["named"])[0]) == 0  # type: ignore[index, arg-type]
        assert float(net(two, one)[0]) == float(net(y=one, x=two)[0]) == float(net(x=two, y=one)[0]) == 1  # type: ignore[index]


def test_a_target_that_this_machine_lacks_is_refused_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefuse.runtime.target.host_cpu_flags", lambda: frozenset(["avx2", "fma"]))
    with pytest.raises(CompileError, match=r"^target: this CPU lacks .*avx512f.*; compile on the machine that shall run"):
        prefuse.compile(parser.parse_model(STATIC), target="cpu:avx512", cache=False)


@pytest.mark.parametrize(("package", "load"), [("numpy", "load"), ("ml_dtypes", "load"), ("ml_dtypes", "load_generator")])
def test_loading_names_the_package_that_is_missing(package: str, load: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "import prefuse\n"
        f"try: prefuse.{load}('net.prefuse')\n"
        "except prefuse.CompileError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wanted = f"load: the package {package} is not installed; programs need numpy, ml_dtypes and apache-tvm"
    assert result.stdout.startswith(wanted)


def test_a_bar_writes_nothing_where_nobody_sees_it() -> None:
    code = "from prefuse.compiler.pipeline.progress import ConsoleProgress as C; bar = C(); bar('one', 0.5); bar('done', 1.0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("", "")


def test_one_operator_is_no_plural() -> None:
    text = '<ir_version: 10, opset_import: ["": 21, "other": 1]> main (float[2] x) => (float[2] y) { y = other.Strange(x) }'
    with pytest.raises(CompileError) as raised:
        prefuse.compile(parser.parse_model(text), cache=False)
    assert "1 operators" not in str(raised.value)
