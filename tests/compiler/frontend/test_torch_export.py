"""PyTorch modules become graphs: names, sources, structures, and errors that name the user's line."""

import dataclasses
import re
import sys
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from prefuse.compiler.frontend.importer import import_model, prepare_graph
from prefuse.compiler.frontend.pytree import Structure, flatten, unflatten
from prefuse.compiler.frontend.torch_export import export_module
from prefuse.compiler.ir.facts import source_of
from prefuse.compiler.ir.states import states_of
from prefuse.runtime.errors import CompileError, InputError, UnsupportedModelError
from torch import nn


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    extra: object = None


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())

    def forward(self, x, unused, pair, scale=None, n: int = 3, *, named=None, flag=True):  # type: ignore[no-untyped-def]
        y = self.norm(self.linear(x)).relu() * n
        if flag:
            y = y + 1
        if scale is not None:
            y = y * scale
        return {"a": y, "b": (y.sum(), x, None, 5), "c": Result(pair[0] + named["k"]), "w": self.linear.weight, "again": y}


def export(module: nn.Module, *args: object, **kwargs: object) -> tuple[ir.Model, Structure]:
    structure, leaves = flatten((args, kwargs))
    found = export_module(module, structure, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    model, result = found.model, found.result
    return prepare_graph(model, "test"), result


@pytest.fixture(scope="module")
def exported() -> tuple[nn.Module, ir.Model, Structure]:
    module = Several()
    pair = [torch.randn(2), torch.randn(1)]
    model, result = export(module, torch.randn(2, 4), torch.randn(3), pair, n=4, named={"k": torch.randn(2)}, flag=False)
    return module, model, result


def test_inputs_are_named_after_parameters(exported: tuple[nn.Module, ir.Model, Structure]) -> None:
    assert [value.name for value in exported[1].graph.inputs] == ["x", "unused", "pair_0", "pair_1", "named_k"]


def test_the_result_keeps_its_structure(exported: tuple[nn.Module, ir.Model, Structure]) -> None:
    _, model, structure = exported
    found = unflatten(structure, [value.name for value in model.graph.outputs])
    assert isinstance(found, dict)
    assert found["b"][2:] == (None, 5)
    assert isinstance(found["c"], Result)
    assert len(model.graph.outputs) == 6


class Clashing(nn.Module):
    """Buffers and parameters of forward() called as torch calls results of operators, and as each other."""

    mean: torch.Tensor
    mask: torch.Tensor
    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "mask", "total"):
            self.register_buffer(name, torch.full((4,), float(len(name))))

    def forward(self, x: torch.Tensor, val_0: torch.Tensor, mask: torch.Tensor, add: torch.Tensor) -> torch.Tensor:
        self.mask += mask
        self.total.copy_(x)
        y = nn.functional.layer_norm(x - self.mean, (4,))
        return y.mean(-1) + val_0 + (self.mask + add).sum()


@pytest.mark.parametrize("is_exported", [False, True])
def test_names_that_clash(is_exported: bool) -> None:
    module, x = Clashing(), torch.randn(4)
    inputs = x, torch.ones(()), torch.ones(4), torch.ones(4)
    if is_exported:
        model = import_model(torch.export.export(module, inputs, strict=False))
    else:
        model, _ = export(module, *inputs)
    given = [value.name for value in model.graph.inputs]
    assert given == ["x", "val_0", "mask", "add", "mask_1", "total"]
    assert "mean" in model.graph.initializers
    assert list(states_of(model).values()) == ["mask_1", "total"]


class Changing(nn.Module):
    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        cache[0] = 5
        return x * 2, cache


@pytest.mark.parametrize("is_exported", [False, True])
def test_changes_of_inputs_that_are_lost(is_exported: bool) -> None:
    """Those of what is returned are not: the caller gets it."""
    inputs = torch.zeros(3), torch.zeros(2, 3)
    program = torch.export.export(Changing(), inputs, strict=False)
    with pytest.warns(UserWarning, match="the module changes x in place, which its program leaves"):
        import_model(program) if is_exported else export(Changing(), *inputs)


def test_every_node_knows_its_line(exported: tuple[nn.Module, ir.Model, Structure]) -> None:
    lines = {source_of(node).rpartition(":")[0] for node in exported[1].graph if node.op_type != "Identity"}
    assert lines == {__file__}


def test_weights_are_torchs_own(exported: tuple[nn.Module, ir.Model, Structure]) -> None:
    module, model, _ = exported
    tensor = model.graph.initializers["linear.weight"].const_value
    assert tensor is not None
    assert tensor.numpy().ctypes.data == module.get_parameter("linear.weight").data_ptr()


def test_the_module_stays_in_training_mode(exported: tuple[nn.Module, ir.Model, Structure]) -> None:
    module, model, _ = exported
    assert all(part.training for part in module.modules())
    assert not any(node.op_type == "Dropout" for node in model.graph)


def test_a_module_of_torch_alone() -> None:
    model, _ = export(nn.Linear(3, 2), torch.randn(1, 3))
    assert "torch/nn/modules/linear.py" in source_of(next(iter(model.graph)))


def test_all_missing_operators_are_named_with_their_lines() -> None:
    class Missing(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.linalg.eigvals(x), torch.special.bessel_j0(x)

    with pytest.raises(UnsupportedModelError) as caught:
        export(Missing(), torch.randn(2, 2))
    assert "2 operators" in str(caught.value)
    assert str(caught.value).count(f"{__file__}:") == 2


def test_a_branch_on_data_is_named_with_its_line() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(CompileError, match=rf"{re.escape(__file__)}:\d+: torch.export cannot trace the module"):
        export(Branch(), torch.randn(2))


def test_a_line_in_a_folder_of_our_own_name_is_the_users(tmp_path: Path) -> None:
    """`git clone` makes such a folder, and many a user keeps his models in it."""
    path = tmp_path / "prefuse" / "network.py"
    module = nn.Module()
    exec(compile("def forward(x):\n    return x if x.sum() > 0 else -x\n", path, "exec"), module.__dict__)
    with pytest.raises(CompileError, match=rf"{re.escape(str(path))}:2: torch.export cannot trace the module"):
        export(module, torch.randn(2))


def test_a_failed_trace_is_one_error_and_no_dump(capfd: pytest.CaptureFixture[str]) -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("traced", file=sys.stderr)
            return x + 1 if bool(x.sum() > 0) else x

    with pytest.raises(CompileError, match=rf"{re.escape(__file__)}:\d+: torch.export cannot trace"):
        export(Branch(), torch.randn(2))
    assert capfd.readouterr().err.strip() == "traced"


def test_a_result_that_is_no_tensor() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return Path(str(x.shape))

    with pytest.raises(InputError, match="neither a tensor nor a container"):
        export(Odd(), torch.randn(2))


def test_exported_programs_keep_their_dynamic_dimensions() -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(nn.Linear(3, 2), (torch.randn(4, 3),), dynamic_shapes=({0: batch},), strict=False)
    (value,) = import_model(program).graph.inputs
    assert value.shape is not None
    assert not value.shape.is_static()
    assert value.shape[1] == 3


def test_constants_among_results_leave_the_others_their_types() -> None:
    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[object, ...]:
            return None, x + 1, (x > 0).long(), x.bfloat16().sum()

    model = import_model(torch.export.export(Mixed(), (torch.randn(4),), strict=False))
    assert [value.dtype for value in model.graph.outputs] == [ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.BFLOAT16]


def test_importing_the_frontend_does_not_import_torch() -> None:
    import subprocess

    program = "import sys, prefuse.compiler.api; print([m for m in ('torch', 'tvm', 'onnx', 'onnxscript') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
