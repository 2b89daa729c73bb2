"""Damage that is measured: against operands rounded in NumPy, and against the models that quantization makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from prefuse.compiler.bits.indicators.choice import INDICATORS, default_indicator
from prefuse.compiler.bits.indicators.measured import Distance, Evaluator, MeasuredPerturbation
from prefuse.compiler.bits.indicators.roundings import ROUNDINGS, rounded_activations
from prefuse.compiler.bits.indicators.study import Study
from prefuse.compiler.engines.onnxruntime_session import OnnxRuntimeSession
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.quantization.quantizer import Settings, calibrate
from prefuse.compiler.quantization.units import UnitFormat, find_units
from prefuse.runtime.errors import InputError, OptionError
from prefuse.runtime.target import Target

FORMATS = ("float32", "bfloat16", "int8", "int8-rows", "w8", "w4")
RNG = np.random.default_rng(0)
CHAIN = """
<ir_version: 10, opset_import: ["": 21]>
main (float[N,40] x) => (float[N,7] y) {
  h = MatMul(x, w)
  r = Relu(h)
  m = MatMul(r, v)
  y = Tanh(m)
}
"""
BRANCHES = """
<ir_version: 10, opset_import: ["": 18]>
main (float[N,4,6,6] x, bool flag) => (float[N,8,6,6] y, float[N,8,6,6] z, int64[4] n) {
  a = Conv<pads=[1,1,1,1]>(x, w)
  b = Conv(x, u)
  c = If(flag) <then_branch = yes () => (float[N,8,6,6] p) { p = Relu(a) },
                else_branch = no () => (float[N,8,6,6] q) { q = Neg(a) }>
  y = Add(b, c)
  d = Conv(y, v)
  z = Sub(d, c)
  n = Shape(z)
}
"""


def read(text: str, weights: Mapping[str, tuple[int, ...]]) -> ir.Model:
    """A model of the frontend's dialect with random weights."""
    model = ir.from_onnx_text(text)
    for node in model.graph:
        for position, value in enumerate(node.inputs):
            name = "" if value is None else str(value.name)
            if name in weights:
                array = (RNG.standard_normal(weights[name]) * 0.3).astype(np.float32)
                new = ir.Value(name=name, const_value=ir.tensor(array, name=name))
                new.type, new.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(array.shape)
                node.replace_input_with(position, new)
                model.graph.register_initializer(new)
    return import_model(model)


def chain() -> ir.Model:
    return read(CHAIN, {"w": (40, 33), "v": (33, 7)})


def study_of(model: ir.Model, count: int = 2) -> Study:
    batches = [{"x": RNG.standard_normal((3, 40)).astype(np.float32)} for _ in range(count)]
    return Study(model, batches, {product.name: (product.name,) for product in find_units(model)}, FORMATS)


def test_equals_operands_rounded_by_numpy() -> None:
    """Each product of a chain alone, and both, in every format: the formats' own arithmetic on arrays gives the same damage."""
    study = study_of(chain())
    first, second = study.products.values()
    exact_r = [np.maximum(batch["x"] @ first.weights, 0) for batch in study.batches]
    spans = [(min(0.0, min(x.min() for x in xs)), max(x.max() for x in xs)) for xs in ([b["x"] for b in study.batches], exact_r)]

    def outputs(forms: tuple[str, str]) -> list[np.ndarray]:
        found = []
        for batch in study.batches:
            value = batch["x"]
            for product, form, span in zip((first, second), forms, spans, strict=True):
                rounding = ROUNDINGS[form]
                value = rounded_activations(value, rounding.activations, span) @ rounding.weights(product.weights, 1)
                value = np.maximum(value, 0) if product is first else np.tanh(value)
            found.append(value)
        return found

    def damage(forms: tuple[str, str]) -> float:
        exact = outputs(("float32", "float32"))
        difference = sum(((a - b) ** 2).sum() for a, b in zip(outputs(forms), exact, strict=True))
        return float(difference / sum((one**2).sum() for one in exact))

    damages = MeasuredPerturbation().damages(study)
    for column, form in enumerate(FORMATS):
        assert damages[0, column] == pytest.approx(damage((form, "float32")), rel=0.02)
        assert damages[1, column] == pytest.approx(damage(("float32", form)), rel=0.02)
    assert (damages[:, 0] == 0).all()
    assert (damages[:, 1:] > 0).all()
    both = [{first.name: form, second.name: form} for form in FORMATS]
    for form, found in zip(FORMATS, Evaluator(study).damages(both, study.batches), strict=True):
        assert found == pytest.approx(damage((form, form)), rel=0.02, abs=1e-12)


def test_two_products_of_one_unit() -> None:
    """A unit's second product reads what its first one made of rounded operands."""
    model = chain()
    names = tuple(product.name for product in find_units(model))
    study = study_of(model)
    joined = Study(model, study.batches, {"both": names}, FORMATS)
    whole = Evaluator(joined).damages([{"both": form} for form in FORMATS], joined.batches)
    assert MeasuredPerturbation().damages(joined)[0] == pytest.approx(whole, rel=1e-3, abs=1e-12)


@pytest.mark.parametrize("flag", [True, False])
def test_any_graph_can_be_cut(flag: bool) -> None:
    """Convolutions side by side, an If that reads around itself, outputs made before others, one of integers."""
    model = read(BRANCHES, {"w": (8, 4, 3, 3), "u": (8, 4, 1, 1), "v": (8, 8, 1, 1)})
    batches = [{"x": RNG.standard_normal((2, 4, 6, 6)).astype(np.float32), "flag": np.array(flag)}]
    units = {product.name: (product.name,) for product in find_units(model)}
    assert len(units) == 3
    study = Study(model, batches, units, FORMATS)
    damages, evaluator = MeasuredPerturbation().damages(study), Evaluator(study)
    for row, unit in enumerate(units):
        for column, form in enumerate(FORMATS):
            if form == "int8-rows":
                assert damages[row, column] == np.inf
            else:
                (whole,) = evaluator.damages([{unit: form}], batches)
                assert damages[row, column] == pytest.approx(whole, rel=1e-3, abs=1e-11)


@pytest.mark.parametrize(("level", "has_pairs"), [("avx2", True), ("avx512vnni", False)])
def test_equals_what_quantization_places(level: str, has_pairs: bool) -> None:
    """The model with QuantizeLinear and DequantizeLinear of one unit alone, run by ONNX Runtime, has the damage of its format."""
    model, target = chain(), Target("cpu", level)
    batches = [{"x": RNG.standard_normal((3, 40)).astype(np.float32)} for _ in range(3)]
    calibrated = calibrate(model, batches, target, Settings(is_smooth=False))
    assert calibrated.keeps_pairs == has_pairs
    names = [unit.name for unit in calibrated.units]
    study = Study(calibrated.model, batches, {name: (name,) for name in names}, ("int8", "int8-rows"), keeps_pairs=has_pairs)
    damages = MeasuredPerturbation().damages(study)
    float_session = OnnxRuntimeSession(calibrated.model, optimize=False)
    for row, name in enumerate(names):
        for column, form in enumerate(get_args(UnitFormat)):
            assert form == study.formats[column]
            placed = OnnxRuntimeSession(calibrated.place({name: form}), optimize=False)
            distance = Distance()
            for batch in batches:
                distance.add({"y": placed.run(batch)[0]}, {"y": float_session.run(batch)[0]})
            assert damages[row, column] == pytest.approx(distance.damage, rel=0.02)


def test_damage_of_the_output_that_suffers_most() -> None:
    distance = Distance()
    distance.add({"a": np.array([1.0, 2.0]), "b": np.array([0.0])}, {"a": np.array([1.0, 1.0]), "b": np.array([4.0])})
    distance.add({}, {"a": np.array([1.0, 1.0]), "b": np.array([np.inf])})
    assert distance.damage == 1.0
    broken = Distance()
    broken.add({"a": np.array([np.nan])}, {"a": np.array([1.0])})
    assert broken.damage == np.inf
    assert Distance().damage == 0.0


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_damage_is_summed_exactly(dtype: type) -> None:
    """Against float64, where float32 sums would lose the small elements, and those of 16 bits overflow."""
    large: np.ndarray = RNG.uniform(1, 2, (5, 4001)).astype(dtype)
    large[0, 0] = 2048
    changed: np.ndarray = (large.astype(np.float64) * (1 + RNG.uniform(-0.1, 0.1, large.shape))).astype(dtype)
    distance = Distance()
    distance.add({"a": changed}, {"a": large})
    wide, exact = changed.astype(np.float64), large.astype(np.float64)
    assert distance.damage == pytest.approx(((wide - exact) ** 2).sum() / (exact**2).sum(), rel=1e-6)


def test_ranges_may_be_given() -> None:
    """A range that cuts activations off damages more than what was observed."""
    model = chain()
    study = study_of(model)
    name = str(study.products[next(iter(study.units))].activations.name)
    cut = Study(model, study.batches, study.units, FORMATS, {name: (-0.5, 0.5)})
    assert MeasuredPerturbation().damages(cut)[0, 2] > 10 * MeasuredPerturbation().damages(study)[0, 2]


def test_what_is_measured_where_torch_is_not() -> None:
    study = study_of(chain())
    assert isinstance(default_indicator(study), MeasuredPerturbation)
    assert set(INDICATORS) == {"measured", "gradients", "sqnr", "hutchinson", "qsync"}
    with pytest.raises(OptionError, match="there is no torch module"):
        INDICATORS["gradients"]().damages(study)


def test_refusals() -> None:
    model = chain()
    good, units = {"x": np.zeros((3, 40), np.float32)}, {"u": (find_units(model)[0].name,)}
    with pytest.raises(InputError, match="there are no batches"):
        Study(model, [], units, FORMATS)
    with pytest.raises(InputError, match="batch 1: it has no input 'x'"):
        Study(model, [good, {}], units, FORMATS)
    with pytest.raises(InputError, match="has NaNs"):
        Study(model, [{"x": np.full((3, 40), np.nan, np.float32)}], units, FORMATS)
    with pytest.raises(InputError, match="input 'x' is a list"):
        Study(model, [{"x": [1.0]}], units, FORMATS)  # type: ignore[dict-item]
    with pytest.raises(OptionError, match="format 'int3': it is unknown; give some of float32"):
        Study(model, [good], units, ("int3",))
    with pytest.raises(OptionError, match="'node_9' is no product"):
        Study(model, [good], {"u": ("node_9",)}, FORMATS)
