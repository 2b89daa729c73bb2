"""Every pass by its name on the command line, and the order in which they run.

Strings, so that naming a pass imports nothing.
"""

from __future__ import annotations

PASSES: dict[str, str] = {
    "canonicalize": "prefuse.passes.canonicalize:Canonicalize",
    "eliminate-dead": "prefuse.passes.eliminate_dead:EliminateDead",
    "merge-equal": "prefuse.passes.merge_equal:MergeEqual",
    "decompose": "prefuse.passes.decompose:Decompose",
    "bound-shapes": "prefuse.passes.bound_shapes:BoundShapes",
    "unroll-loops": "prefuse.passes.unroll_loops:UnrollLoops",
    "fuse-attention": "prefuse.passes.fuse_attention:FuseAttention",
    "fuse-gather": "prefuse.passes.fuse_gather:FuseGather",
    "fuse-epilogue": "prefuse.passes.fuse_epilogue:FuseEpilogue",
    "order-nodes": "prefuse.passes.order_nodes:OrderNodes",
    "plan-memory": "prefuse.passes.plan_memory:PlanMemory",
}

DEFAULT_PIPELINE = (
    "canonicalize,unroll-loops,eliminate-dead,merge-equal,decompose,bound-shapes,canonicalize,merge-equal,"
    "eliminate-dead,fuse-gather,fuse-epilogue,order-nodes,plan-memory"
)

# What resolves shapes and control flow as far as can be before a run, where a model has any that is not plain.
STRUCTURE_PIPELINE = "canonicalize,unroll-loops,eliminate-dead,decompose,canonicalize,eliminate-dead"
