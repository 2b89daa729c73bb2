"""Every pass by its name on the command line, and the order in which they run.

Strings, so that naming a pass imports nothing.
"""

from __future__ import annotations

import re

PASSES: dict[str, str] = {
    "canonicalize": "prefuse.passes.structure.canonicalize:Canonicalize",
    "eliminate-dead": "prefuse.passes.structure.eliminate_dead:EliminateDead",
    "merge-equal": "prefuse.passes.structure.merge_equal:MergeEqual",
    "decompose": "prefuse.passes.structure.decompose:Decompose",
    "bound-shapes": "prefuse.passes.structure.bound_shapes:BoundShapes",
    "unroll-loops": "prefuse.passes.structure.unroll_loops:UnrollLoops",
    "fuse-norm": "prefuse.passes.operators.fuse_norm:FuseNorm",
    "fuse-attention": "prefuse.passes.fusion.fuse_attention:FuseAttention",
    "fold-batchnorm": "prefuse.passes.weights.fold_batchnorm:FoldBatchnorm",
    "order-concats": "prefuse.passes.plan.order_concats:OrderConcats",
    "concat-to-split-weight": "prefuse.passes.weights.concat_to_split_weight:ConcatToSplitWeight",
    "merge-parallel-matmul": "prefuse.passes.weights.merge_parallel_matmul:MergeParallelMatmul",
    "fuse-recurrent": "prefuse.passes.operators.fuse_recurrent:FuseRecurrent",
    "reassociate-product": "prefuse.passes.weights.reassociate_product:ReassociateProduct",
    "sink-reorders": "prefuse.passes.fusion.sink_reorders:SinkReorders",
    "fuse-gather": "prefuse.passes.fusion.fuse_gather:FuseGather",
    "assign-formats": "prefuse.passes.precision.assign_formats:AssignFormats",
    "sink-scales": "prefuse.passes.precision.sink_scales:SinkScales",
    "keep-weights": "prefuse.passes.precision.keep_weights:KeepWeights",
    "share-tables": "prefuse.passes.weights.share_tables:ShareTables",
    "quantize-weights": "prefuse.passes.precision.quantize_weights:QuantizeWeights",
    "split-weights": "prefuse.passes.weights.split_weights:SplitWeights",
    "place-casts": "prefuse.passes.precision.place_casts:PlaceCasts",
    "choose-layout": "prefuse.passes.layout.choose_layout:ChooseLayout",
    "fuse-rows": "prefuse.passes.fusion.fuse_rows:FuseRows",
    "fuse-epilogue": "prefuse.passes.fusion.fuse_epilogue:FuseEpilogue",
    "merge-groups": "prefuse.passes.fusion.merge_groups:MergeGroups",
    "fuse-prologue": "prefuse.passes.fusion.fuse_prologue:FusePrologue",
    "fuse-concat": "prefuse.passes.fusion.fuse_concat:FuseConcat",
    "fuse-reorders": "prefuse.passes.fusion.fuse_reorders:FuseReorders",
    "order-nodes": "prefuse.passes.plan.order_nodes:OrderNodes",
    "plan-memory": "prefuse.passes.plan.plan_memory:PlanMemory",
    "schedule-prefetch": "prefuse.passes.plan.schedule_prefetch:SchedulePrefetch",
}

# Structure first, then what ONNX spells out as its own operators, then what moves weights together, then groups; fuse-epilogue
# once more for what transposes stood between. Weights are cut within a memory limit when it is decided what each product is and
# reads, so that pieces are computed as the whole would have been.
DEFAULT_PIPELINE = (
    "canonicalize,unroll-loops,eliminate-dead,merge-equal,sink-scales,keep-weights,decompose,bound-shapes,canonicalize,merge-equal,eliminate-dead,"
    "fuse-norm,fuse-recurrent,reassociate-product,"
    "fold-batchnorm,canonicalize,eliminate-dead,order-concats,concat-to-split-weight,merge-parallel-matmul,"
    "fold-batchnorm,canonicalize,eliminate-dead,"
    "fuse-attention,sink-reorders,fuse-gather,share-tables,quantize-weights,assign-formats,split-weights,place-casts,"
    "fuse-rows,fuse-epilogue,merge-groups,choose-layout,canonicalize,merge-equal,eliminate-dead,fuse-epilogue,fuse-prologue,"
    "fuse-concat,fuse-reorders,order-nodes,plan-memory,schedule-prefetch"
)

# What resolves shapes and control flow as far as can be before a run, where a model has any that is not plain.
STRUCTURE_PIPELINE = "canonicalize,unroll-loops,eliminate-dead,decompose,canonicalize,eliminate-dead"

# Passes of these names put several nodes into one or move work between them; what they leave out still compiles.
_FUSION_PREFIXES = ("fuse-", "merge-", "fold-", "concat-", "choose-", "sink-", "order-concats")
_NOT_FUSION = ("merge-equal",)
_ITEM = re.compile(r"[^,{}]+(?:\{[^}]*\})?")  # a pass with its options


def without_fusion(pipeline: str) -> str:
    """A pipeline without its fusing passes, so that each operator is a group of its own."""
    items = _ITEM.findall(pipeline)
    return ",".join(item for item in items if item.startswith(_NOT_FUSION) or not item.startswith(_FUSION_PREFIXES))


def named_pipeline(text: str | None) -> str:
    """The pipeline that a text means: itself, or what "default" (and None) and "no-fusion" (or "none") stand for."""
    no_fusion = without_fusion(DEFAULT_PIPELINE)
    return {"default": DEFAULT_PIPELINE, "no-fusion": no_fusion, "none": no_fusion}.get(text or "default", text or "")
