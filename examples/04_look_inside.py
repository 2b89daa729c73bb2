"""Watch the passes at work: the pipeline as text, what each pass changes, why fusion refused, the report and the Plan."""

from __future__ import annotations

import difflib

import prefuse
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.pipeline import Context, PassRecord, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.runtime.plan_text import print_plan
from prefuse.runtime.target import Target

MODEL = """
<ir_version: 10, opset_import: ["": 20]>
residual (float[8,64] x, float[64,64] w, float[64] b) => (float[8,64] y, float[8,64] biased) {
  product = MatMul(x, w)
  biased = Add(product, b)
  same = Identity(biased)
  activated = Relu(same)
  y = Mul(activated, x)
}
"""


def show_changes(record: PassRecord) -> None:
    """The lines that a pass has changed."""
    print(f"--- {record.name}: {'changed' if record.changed else 'nothing to do'}, {record.seconds * 1e3:.1f} ms")
    before, after = (record.before_text or "").splitlines(), (record.after_text or "").splitlines()
    lines = list(difflib.unified_diff(before, after, n=2, lineterm=""))[2:]
    print("\n".join(line for line in lines if not line.startswith("@@")))


def main() -> None:
    """Run a pipeline on a graph, then compile the graph as it is."""
    import onnx

    model = import_model(onnx.parser.parse_model(MODEL))
    infer_facts(model)
    context = Context(Target.parse("cpu"))
    passes = parse_pipeline("canonicalize,eliminate-dead,fuse-epilogue{max-ops=4}", PASSES)
    run_pipeline(model, passes, context, on_pass=show_changes, keep_texts=True)
    for remark in context.remarks:
        print(f"remark: {remark}")
    net = prefuse.compile(onnx.parser.parse_model(MODEL))
    print(net.report())
    print(print_plan(net.plan))


if __name__ == "__main__":
    main()
