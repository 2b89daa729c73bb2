"""Classifiers of ai.onnx.ml whose labels are strings."""

from __future__ import annotations

import onnx_ir as ir

from ..ir.rewriter import replace_node

# Their attributes of integer labels.
_CLASSIFIERS = {
    "LinearClassifier": "classlabels_ints",
    "SVMClassifier": "classlabels_ints",
    "TreeEnsembleClassifier": "classlabels_int64s",
}


def number_labels(model: ir.Model) -> None:
    """Let classifiers name classes by their numbers, and look up the strings that have these numbers where anything reads them.

    So a program computes them, and the host the strings alone.
    """
    for node in list(model.graph.all_nodes()):
        labels = node.attributes.get_strings("classlabels_strings", ()) if node.domain == "ai.onnx.ml" else ()
        if node.op_type not in _CLASSIFIERS or len(labels) < 2:
            continue
        kept = [one for name, one in node.attributes.items() if name not in ("classlabels_strings", _CLASSIFIERS[node.op_type])]
        kept.append(ir.AttrInt64s(_CLASSIFIERS[node.op_type], [*range(len(labels))]))
        numbered = ir.Node(node.domain, node.op_type, node.inputs, kept, num_outputs=len(node.outputs), name=node.name)
        new, label, numbers = [numbered], node.outputs[0], numbered.outputs[0]
        if label.consumers() or label.is_graph_output():
            names = ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(list(labels)))])
            new += [names, ir.Node("", "Gather", [names.outputs[0], numbers])]
        replace_node(model.graph, node, new, [new[-1].outputs[0] if len(new) > 1 else None, *numbered.outputs[1:]])
