"""Every pass by its name on the command line, and the pipeline that `compile` runs. Strings, so that the frame imports no pass."""

PASSES: dict[str, str] = {
    "canonicalize": "prefuse.passes.canonicalize:Canonicalize",
    "decompose": "prefuse.passes.decompose:Decompose",
    "eliminate-dead": "prefuse.passes.eliminate_dead:EliminateDead",
    "fuse-epilogue": "prefuse.passes.fuse_epilogue:FuseEpilogue",
    "merge-equal": "prefuse.passes.merge_equal:MergeEqual",
    "order-nodes": "prefuse.passes.order_nodes:OrderNodes",
    "plan-memory": "prefuse.passes.plan_memory:PlanMemory",
}

DEFAULT_PIPELINE = (
    "canonicalize,eliminate-dead,merge-equal,decompose,canonicalize,eliminate-dead,fuse-epilogue,order-nodes,plan-memory"
)
