"""Attributes that are words are those that ONNX has, which neither its checker nor its shape inference asks for."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import prefuse
import pytest
from onnx import parser
from onnx.defs import OpSchema
from prefuse.compiler.frontend.attribute_values import check_attribute_values, legal_values
from prefuse.compiler.frontend.importer import import_model
from prefuse.runtime.errors import InvalidModelError

# Strings that are no words of a list: data, equations, names, patterns.
_FREE = {
    "CategoryMapper.cats_strings",
    "CategoryMapper.default_string",
    "Constant.value_string",
    "Constant.value_strings",
    "DictVectorizer.string_vocabulary",
    "Einsum.equation",
    "Gradient.xs",
    "Gradient.y",
    "Gradient.zs",
    "LabelEncoder.default_string",
    "LabelEncoder.keys_strings",
    "LabelEncoder.values_strings",
    "LinearClassifier.classlabels_strings",
    "OneHotEncoder.cats_strings",
    "RegexFullMatch.pattern",
    "SVMClassifier.classlabels_strings",
    "StringNormalizer.locale",
    "StringNormalizer.stopwords",
    "StringSplit.delimiter",
    "TfIdfVectorizer.pool_strings",
    "TreeEnsembleClassifier.classlabels_strings",
    "ZipMap.classlabels_strings",
}


def _import(body: str, opset: int = 20) -> ir.Model:
    return import_model(parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]>\n{body}'))


def test_every_attribute_of_onnx_that_is_a_word_has_its_list() -> None:
    strings = (OpSchema.AttrType.STRING, OpSchema.AttrType.STRINGS)
    for schema in onnx.defs.get_all_schemas():
        for attribute in schema.attributes.values():
            key = f"{schema.name}.{attribute.name}"
            if attribute.type not in strings or key in _FREE or schema.name == "Upsample":  # which import turns into Resize
                continue
            legal = legal_values(schema.name, attribute.name, onnx.defs.onnx_opset_version())
            assert legal is not None, key
            if attribute.default_value.type:
                assert attribute.default_value.s.decode() in (*legal, ""), key


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ('Resize<mode="xx">(x, , s)', "Resize has mode 'xx', where ONNX knows nearest, linear, cubic"),
        ('Resize<mode="linear", coordinate_transformation_mode="zz">(x, , s)', "coordinate_transformation_mode 'zz'"),
        ('Resize<nearest_mode="up">(x, , s)', "nearest_mode 'up'"),
        ('Conv<auto_pad="same_upper">(x, w)', "auto_pad 'same_upper', where ONNX knows NOTSET, SAME_UPPER"),
        ('Pad<mode="mirror">(x, p)', "mode 'mirror'"),
        ('Gelu<approximate="foo">(x)', "approximate 'foo'"),
        ('DepthToSpace<blocksize=2, mode="dcr">(x)', "mode 'dcr'"),
        ('GridSample<mode="bilinear">(x, g)', "mode 'bilinear', where ONNX knows linear, nearest, cubic"),
        ('GridSample<padding_mode="foo">(x, g)', "padding_mode 'foo'"),
        ('ScatterND<reduction="foo">(x, i, x)', "reduction 'foo'"),
        ("Gelu<approximate=1>(x)", "approximate 1, where"),
    ],
)
def test_words_that_onnx_does_not_have(node: str, message: str) -> None:
    operands = "float[1,4,4,4] x, float[4,4,1,1] w, float[1,2,2,2] g, int64[1,1] i"
    constants = "<float[4] s = {1, 1, 2, 2}, int64[8] p = {0, 0, 1, 1, 0, 0, 1, 1}>"
    with pytest.raises(InvalidModelError, match=message):
        _import(f"main ({operands}) => (float[A,B,C,D] y) {constants} {{ y = {node} }}")


def test_words_in_a_branch_and_in_a_list() -> None:
    operands = "float[2,1,3] x, float[1,3,3] w, float[1,3,3] r, bool c"
    cell = 'RNN<hidden_size=3, activations=["%s"]>(x, w, r)'
    branches = "then_branch = t () => (z) { z = %s }, else_branch = e () => (v) { v = %s }"
    text = f"main (%s) => (float[A,B,C,D] y) {{ y = If(c)<{branches}> }}"
    _import(text % (operands, cell % "RELU", cell % "Tanh"))  # in any case, as ONNX has it
    with pytest.raises(InvalidModelError, match="RNN has activations 'Sinus', where ONNX knows Affine, Elu"):
        _import(text % (operands, cell % "Tanh", cell % "Sinus"))


def test_words_that_changed_with_an_opset() -> None:
    text = 'main (float[1,1,4,4] x, float[1,2,2,2] g) => (float[A,B,C,D] y) { y = GridSample<mode="%s">(x, g) }'
    _import(text % "bilinear", opset=18)
    _import(text % "cubic", opset=20)
    with pytest.raises(InvalidModelError, match="where ONNX knows bilinear, nearest, bicubic"):
        _import(text % "cubic", opset=18)


def test_an_attribute_of_a_function_may_be_its_callers() -> None:
    model = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["": 20, "f": 1]>\nmain (float[4] x) => (float[4] y) { y = f.g<how="tanh">(x) }\n'
        '<domain: "f", opset_import: ["": 20]>\ng <how>(x) => (y) { y = Gelu<approximate: string = @how>(x) }'
    )
    (node,) = model.functions[("f", "g", "")].graph
    model.graph.append(ir.Node("", "Gelu", [model.graph.inputs[0]], node.attributes.values()))
    check_attribute_values(model)


def test_coordinates_of_an_old_opset() -> None:
    """`tf_half_pixel_for_nn` went with opset 13: the middle of an output lies where that of its pixel would be, from the edge."""
    text = 'main (float[1,1,1,4] x) => (float[A,B,C,D] y) <float[4] s = {1, 1, 1, 2}> { y = Resize<mode="nearest", %s>(x, , s) }'
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 13]>\n' + text % 'coordinate_transformation_mode="tf_half_pixel_for_nn"'
    )
    found = prefuse.compile(model, cache=False, threads=1)(np.arange(4, dtype=np.float32).reshape(1, 1, 1, 4))
    np.testing.assert_array_equal(found, [[[[0, 1, 1, 2, 2, 3, 3, 3]]]])
