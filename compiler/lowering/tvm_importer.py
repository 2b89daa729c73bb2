"""The last resort for a single operator: TVM's own ONNX importer and its default, unscheduled loops.

Slow (one thread, no vectors by design), so it serves only what is cold, and reports say where it stands.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import tvm
from tvm import relax, s_tir, tirx
from tvm.ir import PointerType, PrimType
from tvm.relax.frontend.onnx import from_onnx

from ...kernels.groups.group import Group
from ...kernels.template.contract import BuiltKernel, Operand, Refusal
from ...runtime.plan import ALIGNMENT, TensorType
from ..ir.facts import data_type

TEMPLATE = "tvm-default"
_BROKEN_LOOPS = frozenset({"ScatterElements"})  # whose loops TVM's own later passes do not take
# Attributes that the importer does not read, with the value at which that does no harm. Found by ONNX's conformance cases.
_IGNORED_ATTRIBUTES: dict[str, dict[str, object]] = {
    "ConvTranspose": {"output_shape": None},
    "Resize": {"antialias": 0},
    "RoiAlign": {"mode": "avg"},
    "SpaceToDepth": {"mode": "DCR"},
}


def import_kernel(model: ir.Model, node: ir.Node, group: Group) -> BuiltKernel | Refusal:
    """A kernel of one operator as TVM's importer understands it, its steps one after the other."""
    if reason := _misread(node, group):
        return Refusal(f"TVM's importer misreads {reason}")
    try:
        module = from_onnx(_single_node_model(model, node, group), keep_params_in_input=False)
        relaxed = relax.transform
        module = tvm.ir.transform.Sequential(
            [relaxed.DecomposeOpsForInference(), relaxed.LegalizeOps(), relaxed.FoldConstant(), relaxed.DeadCodeElimination()]
        )(module)
        loops = _loops(module)
    except Exception as error:  # whatever the importer raises on a node it does not know
        return Refusal(f"TVM's importer: {str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__}")
    return _Assembly(module["main"], loops, group).build()


def _misread(node: ir.Node, group: Group) -> str:
    """What the importer would silently compute something else for; empty if nothing is known of."""
    for kind in group.types.values():
        if np.dtype(kind.dtype).isbuiltin != 1 and kind.dtype != "bfloat16":
            return kind.dtype
    if node.op_type in _BROKEN_LOOPS:
        return node.op_type
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    for attribute, harmless in _IGNORED_ATTRIBUTES.get(node.op_type, {}).items():
        if attributes.get(attribute, harmless) != harmless:
            return f"{attribute}={attributes[attribute]}"
    return ""


def _single_node_model(model: ir.Model, node: ir.Node, group: Group) -> onnx.ModelProto:
    """The node as a model of its own, its values under names that TVM does not need to change."""
    names = {name: f"v{number}" for number, name in enumerate(dict.fromkeys([*group.inputs, *group.outputs]))}

    def info(name: str) -> onnx.ValueInfoProto:
        kind = group.types[name]
        return onnx.helper.make_tensor_value_info(names[name], data_type(kind.dtype).value, kind.shape)

    proto = ir.to_proto(node)
    assert isinstance(proto, onnx.NodeProto)
    proto.input[:] = [names.get(name, "") for name in proto.input]
    proto.output[:] = [names.get(name, "") for name in proto.output]
    literals = [name for name in dict.fromkeys(group.inputs) if name in group.literals]
    inputs = [info(name) for name in dict.fromkeys(group.inputs) if name not in group.literals]
    initializers = [onnx.numpy_helper.from_array(group.literals[name], names[name]) for name in literals]
    graph = onnx.helper.make_graph([proto], "one", inputs, [info(name) for name in group.outputs], initializers)
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    return onnx.helper.make_model(graph, opset_imports=opsets)


def _loops(module: Any) -> dict[Any, Any]:
    """The module's PrimFuncs as plain loops, without schedulable blocks."""
    functions = {name: function for name, function in module.functions.items() if isinstance(function, tirx.PrimFunc)}
    passes = s_tir.transform
    pipeline = [
        passes.CanonicalizeLoop(),
        passes.LowerInitBlock(),
        passes.PlanAndUpdateBufferAllocationLocation(),
        passes.ConvertBlocksToOpaque(),
        passes.CompactBufferAllocation(),
        passes.LowerMatchBuffer(),
        passes.LowerOpaqueBlock(),
    ]
    lowered = tvm.ir.transform.Sequential(pipeline)(tvm.IRModule(functions))
    return {name.name_hint: function for name, function in lowered.functions.items()}


class _Assembly:
    """One kernel out of a relax function whose bindings are calls of PrimFuncs; intermediates lie in the workspace."""

    def __init__(self, main: Any, loops: dict[str, Any], group: Group) -> None:
        self.main, self.loops, self.group = main, loops, group
        self.workspace = tirx.Var("workspace", PointerType(PrimType("uint8")))
        self.workspace_bytes = 0
        self.pointers: dict[Any, Any] = {}  # of each relax variable's tensor
        self.statements: list[Any] = []

    def build(self) -> BuiltKernel | Refusal:
        inputs = [name for name in dict.fromkeys(self.group.inputs) if name not in self.group.literals]
        if len(inputs) != len(self.main.params):
            return Refusal("TVM's importer changed the inputs")
        parameters = [_pointer(self.group.types[name]) for name in (*inputs, *self.group.outputs)]
        self.pointers.update(zip(self.main.params, parameters, strict=False))
        bindings = [binding for block in self.main.body.blocks for binding in block.bindings]
        results = self.main.body.body
        results = list(results.fields) if isinstance(results, relax.Tuple) else [results]
        made = {binding.var for binding in bindings}
        if len(set(results)) != len(self.group.outputs) or not made.issuperset(results):
            return Refusal("TVM's importer returns values that no kernel makes")
        self.pointers.update(zip(results, parameters[len(inputs) :], strict=True))
        for binding in bindings:
            if reason := self._bind(binding.var, binding.value):
                return Refusal(reason)
        body: Any = tirx.SeqStmt([*self.statements, tirx.Return(tirx.const(0, "int32"))])
        for key, value in (("device_id", 0), ("device_type", 1)):
            body = tirx.AttrStmt(tvm.ir.StringImm("default"), key, tirx.const(value, "int32"), body)
        function = tirx.PrimFunc(
            [*parameters, *([self.workspace] if self.workspace_bytes else [])], body, ret_type=PrimType("int32")
        )
        function = _flat(function.with_attr("tirx.noalias", True).with_attr("s_tir", True))
        return BuiltKernel(TEMPLATE, function, tuple(Operand(name) for name in inputs), self.workspace_bytes)

    def _bind(self, variable: Any, value: Any) -> str:
        """Emit one binding; the reason where it cannot be."""
        if not (isinstance(value, tvm.ir.Call) and value.op == tvm.ir.Op.get("relax.call_tir")):
            return "TVM's importer leaves an operator that is no loop nest"
        name, arguments = value.args[0].name_hint, list(value.args[1].fields)
        if not all(argument in self.pointers for argument in arguments):
            return "TVM's importer makes constants"
        if not isinstance(variable.ty, relax.TensorType):
            return "TVM's importer makes several tensors at once"
        if variable not in self.pointers:
            self.pointers[variable] = self._scratch(variable.ty)
        function = self.loops.pop(name, None)  # a second call would define its variables twice
        if function is None:
            return "TVM's importer calls one loop nest twice"
        if "call_packed" in str(function) or "call_cpacked" in str(function):
            return "TVM's importer calls a library"
        pointers = [self.pointers[one] for one in (*arguments, variable)]
        self.statements += [tirx.DeclBuffer(p, data=pointer) for p, pointer in zip(function.params, pointers, strict=True)]
        self.statements.append(function.body)
        return ""

    def _scratch(self, kind: Any) -> Any:
        """A pointer into the workspace for an intermediate of static type."""
        own = TensorType(tuple(int(extent) for extent in kind.shape.values), str(kind.dtype))
        pointer = _pointer(own)
        byte = tirx.decl_buffer((1,), "uint8", name="bytes", layout=None)
        self.statements.append(tirx.DeclBuffer(byte, data=self.workspace))
        self.statements.append(tirx.Bind(pointer, tirx.reinterpret(pointer.ty, tirx.address_of(byte[self.workspace_bytes]))))
        self.workspace_bytes += -(-max(own.size_bytes, 1) // ALIGNMENT) * ALIGNMENT
        return pointer


def _flat(function: Any) -> Any:
    """The function with all buffers flat, as those of our templates are."""
    name = tvm.ir.GlobalVar("flat")
    return tirx.transform.FlattenBuffer()(tvm.IRModule({name: function}))["flat"]


def _pointer(kind: TensorType) -> Any:
    return tirx.Var("p", PointerType(PrimType(kind.dtype)))
