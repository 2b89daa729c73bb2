"""Models whose weights programs for other sizes of the same model read, too: packed once, in one form.

A kernel's best packing depends on how many rows it multiplies: a step of text generation multiplies one, a prompt hundreds. Where
both shall read the same bytes, the form may depend on nothing but the weights and the target.
"""

from __future__ import annotations

import onnx_ir as ir

SHARES_KEY = "prefuse.shares_weights"  # of the model's metadata
# Metadata of a Gather of rows: its table is a product's weights, too; and it lies in the panels that kernels of products read.
TABLE, PANELS = "prefuse.table", "prefuse.panels"


def declare_shared_weights(model: ir.Model) -> None:
    """Say that programs for other sizes read the weights of a model."""
    model.metadata_props[SHARES_KEY] = "1"


def has_shared_weights(model: ir.Model) -> bool:
    """Whether programs for other sizes read the weights of a model."""
    return model.metadata_props.get(SHARES_KEY) == "1"
