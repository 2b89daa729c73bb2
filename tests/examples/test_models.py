"""The model zoo: equal bits at every build, outputs worth comparing, and an ONNX export that ONNX Runtime agrees with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from prefuse.examples.models import MODELS, Inputs, export_onnx
from prefuse.tests.models.exports import Exports
from torch import Tensor, nn

PUBLISHED_PARAMETERS = {  # of the papers' or the reference implementations' models
    "lenet5": 61_706,  # with full connections from S2 to C3
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "unet": 31_030_658,
    "bert-base": 109_482_240,
    "roberta-base": 124_645_632,
    "gpt2": 124_439_808,
    "vit-b16": 86_567_656,
    "gru-seq2seq": 20_518_405,
}


def run(module: nn.Module, inputs: Inputs) -> tuple[Tensor, ...]:
    outputs = module(*inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    difference = np.linalg.norm(actual.astype(np.float64) - expected.astype(np.float64))
    return float(difference / np.linalg.norm(expected.astype(np.float64)))


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_full_size_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):  # no memory, no time
        module, _ = MODELS[name].full()
    assert sum(parameter.numel() for parameter in module.parameters()) == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", MODELS)
def test_two_builds_are_bitwise_equal_and_leave_the_random_state(name: str) -> None:
    before = torch.random.get_rng_state()
    first, second = (run(*MODELS[name].build(small=True)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", MODELS)
def test_activations_are_of_order_one(name: str) -> None:
    module, inputs = MODELS[name].build(small=True)
    deviations: dict[str, float] = {}

    def record(layer_name: str, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and output.numel() > 1:
            deviations[layer_name] = output.double().std().item()

    for layer_name, layer in module.named_modules():
        layer.register_forward_hook(lambda _module, _inputs, output, name=layer_name: record(name, output))
    run(module, inputs)
    assert deviations
    assert {name: value for name, value in deviations.items() if not 0.02 < value < 20} == {}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_depend_on_place_and_on_inputs(name: str) -> None:
    module, inputs = MODELS[name].build(small=True)
    changed = (inputs[0].flip(-1), *inputs[1:])
    scores, other_scores = run(module, inputs)[0], run(module, changed)[0]
    assert scores.isfinite().all()
    assert scores.std() > 0.02
    assert not torch.allclose(scores, other_scores, rtol=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_onnx_runtime_agrees_with_torch(name: str, exports: Exports) -> None:
    module, inputs = MODELS[name].build(small=True)
    export = exports(name)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(export.path, options, providers=["CPUExecutionProvider"])
    for actual, expected in zip(session.run(None, export.inputs), run(module, inputs), strict=True):
        assert actual.shape == expected.shape
        assert relative_error(actual, expected.numpy()) < 2e-6


class _Windows(nn.Module):
    """Attention within windows: queries, keys and values of five dimensions, which torch's exporter has no form of."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, 4)).permute(3, 0, 1, 4, 2, 5).unbind(0)
        return nn.functional.scaled_dot_product_attention(query, key, value)


def test_what_torch_cannot_export_is_written_as_prefuse_writes_it(tmp_path: Path) -> None:
    torch.manual_seed(3)
    module, inputs = _Windows().eval(), (torch.randn(2, 3, 5, 8),)
    names = export_onnx(module, inputs, tmp_path / "windows.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "windows.onnx", providers=["CPUExecutionProvider"])
    [actual] = session.run(None, {names[0]: inputs[0].numpy()})
    with torch.no_grad():
        assert relative_error(actual, module(*inputs).numpy()) < 1e-6
