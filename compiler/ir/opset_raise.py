"""Raising a model to a newer opset, where no operator of it changes its meaning.

ONNX has operators for what older exporters spell out: Gelu since opset 20, RMSNormalization since 23, Swish since 24. A model
of an older opset may use them once it says that it is of the newer one, if every operator that it has means the same there.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from .facts import schema_of
from .rewriter import Rejection

OLDEST = 18  # the opset of the frontend's dialect, from which the lists below were compared
NEWEST = 24  # the opset up to which they were

# Operators whose versions between OLDEST and NEWEST are supersets of each other, by the reason why.
_SUPERSETS: dict[str, str] = {
    "element types were added": """
        Acos Acosh Asin Asinh Atan Atanh Bernoulli Constant ConstantOfShape Conv ConvTranspose Cos Cosh Det Dropout
        Elu Equal EyeLike Flatten GRU GlobalAveragePool GlobalLpPool GlobalMaxPool HardSigmoid HardSwish Identity If
        InstanceNormalization IsInf IsNaN LSTM Loop LpPool MaxPool MaxRoiPool MaxUnpool Mish Multinomial
        NegativeLogLikelihoodLoss QLinearMatMul RNN RandomNormal RandomNormalLike RandomUniform RandomUniformLike ReduceMax
        ReduceMin Reshape RoiAlign Round Scan Selu Shape Sin Sinh Size Softplus Softsign SplitToSequence Squeeze Tan
        ThresholdedRelu TopK Transpose Unsqueeze""",
    "an attribute has a new value, none of the old ones another meaning": "Pad Resize",
    "new attributes have the old meaning by default": "Cast CastLike DequantizeLinear QuantizeLinear",
}
SUPERSETS = frozenset(name for names in _SUPERSETS.values() for name in names.split())


def raise_obstacle(model: ir.Model, opset: int) -> Rejection | None:
    """Why the model cannot be raised to `opset`, and the nodes that would change; None if it can be, or need not be."""
    imports = model.graph.opset_imports
    if opset <= imports[""]:
        return None
    if not OLDEST <= imports[""] <= opset <= NEWEST:
        return Rejection(f"opset {imports['']} is not raised to {opset}")
    raised = {**imports, "": opset}
    for node in _nodes(model):
        if node.domain != "" or node.op_type in SUPERSETS or _is_plain_pool(node):
            continue
        now, then = schema_of(node, imports), schema_of(node, raised)
        if now is None or then is None or now.since_version != then.since_version:
            return Rejection(f"{node.op_type} means something else in opset {opset} than in {imports['']}", (node,))
    return None


def _is_plain_pool(node: ir.Node) -> bool:
    """Opset 19 gave AveragePool dilations, none by default, and another count of what ceil_mode adds."""
    return node.op_type == "AveragePool" and not node.attributes.get_int("ceil_mode", 0)


def raise_opset(model: ir.Model, opset: int) -> None:
    """Make the model, and the functions of it, of at least this opset. `raise_obstacle` must have found nothing."""
    if opset <= model.graph.opset_imports[""]:
        return
    for owner in (model.graph, *(function.graph for function in model.functions.values())):
        if "" in owner.opset_imports:
            owner.opset_imports[""] = max(opset, owner.opset_imports[""])
    for node in _nodes(model):
        if node.domain == "" and node.version is not None:
            node.version = max(opset, node.version)


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()
