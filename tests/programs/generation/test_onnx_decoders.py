"""Decoders in ONNX files, as Optimum and ONNX Runtime write them: their texts are torch's, and what cannot be is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import prefuse
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.generation.onnx_step import find_decoder, step_model
from prefuse.compiler.generation.position_tables import check_position_tables
from prefuse.runtime.errors import OptionError, UnsupportedModelError
from prefuse.runtime.target import Target

from .test_texts import MAX_TOKENS, PROMPTS, VOCABULARY, continued, language_model

transformers = pytest.importorskip("transformers")
LAYERS, HEADS, WIDTH = 2, 4, 32


class WithCaches(torch.nn.Module):
    """A language model whose caches are inputs and outputs."""

    def __init__(self, model: Any, *, has_positions: bool) -> None:
        super().__init__()
        self.model, self.has_positions = model, has_positions

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *pasts: Any) -> Any:
        cache = transformers.DynamicCache()
        for layer in range(len(pasts) // 2):
            cache.update(pasts[2 * layer], pasts[2 * layer + 1], layer)
        positions = {"position_ids": position_ids} if self.has_positions else {}
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **positions)
        kept = [one for layer in found.past_key_values.layers for one in (layer.keys, layer.values)]
        return found.logits, *kept


def exported(model: Any, path: Path, groups: int, *, has_positions: bool = True) -> Path:
    """A file with the names and symbolic dimensions of Optimum's."""
    tokens, past = 3, 5
    pasts = [torch.zeros(2, groups, past, WIDTH // HEADS) for _ in range(2 * LAYERS)]
    names = [f"past_key_values.{layer}.{part}" for layer in range(LAYERS) for part in ("key", "value")]
    mask = torch.ones(2, past + tokens, dtype=torch.int64)
    positions = torch.arange(past, past + tokens).expand(2, -1)
    arguments = (torch.zeros(2, tokens, dtype=torch.int64), mask, positions, *pasts)
    batch, new, old, whole = (torch.export.Dim(name) for name in ("batch", "sequence", "past", "total"))
    free = {0: batch, 1: new}
    axes = (free, {0: batch, 1: whole}, free if has_positions else None, tuple({0: batch, 2: old} for _ in pasts))
    dynamic = tuple(dict.fromkeys(one, torch.export.Dim.DYNAMIC) if isinstance(one, dict) else one for one in axes[:3])
    caches = tuple({0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC} for _ in pasts)
    torch.onnx.export(
        WithCaches(model, has_positions=has_positions),
        arguments,
        str(path),
        input_names=["input_ids", "attention_mask", "position_ids", *names],
        output_names=["logits", *(name.replace("past_key_values", "present") for name in names)],
        dynamic_shapes=(*dynamic, caches),
        dynamo=True,
        optimize=False,
        verbose=False,
    )
    if not has_positions:
        proto = onnx.load(path)
        kept = [value for value in proto.graph.input if value.name != "position_ids"]
        del proto.graph.input[:]
        proto.graph.input.extend(kept)
        onnx.save(proto, path)
    return path


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return language_model(n_positions=64, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS)


@pytest.fixture(scope="module")
def gpt2_file(gpt2: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(gpt2, tmp_path_factory.mktemp("decoder") / "gpt2.onnx", HEADS)


def test_texts_of_a_file_are_those_of_torch(gpt2: Any, gpt2_file: Path, tmp_path: Path) -> None:
    """Prompts of different lengths, one longer than a piece; twice the same; saved and loaded."""
    generator = prefuse.compile_generation(gpt2_file, max_tokens=MAX_TOKENS, prefill=(8,), batch=2, threads=2, cache=False)
    texts = np.array([continued(gpt2, prompt, 20) for prompt in PROMPTS])
    assert len(set(texts[0].tolist())) > 4
    for _ in range(2):
        np.testing.assert_array_equal(generator.generate(PROMPTS, 20), texts)
    generator.save(tmp_path / "g.prefuse")
    np.testing.assert_array_equal(prefuse.load_generator(tmp_path / "g.prefuse").generate(PROMPTS, 20), texts)
    session = generator.session()
    parts = [session.generate(PROMPTS, 7), session.generate([[], []], 13)]
    np.testing.assert_array_equal(np.concatenate(parts, 1), texts)
    n = MAX_TOKENS + 1 - len(PROMPTS[0])
    np.testing.assert_array_equal(generator.generate(PROMPTS, n)[0], continued(gpt2, PROMPTS[0], n))


def test_a_step_writes_rows_in_place(gpt2_file: Path) -> None:
    """One token: no Concat of a whole past, whose states are as large as their renewals."""
    decoder = find_decoder(import_model(gpt2_file))
    target = Target.parse("cpu")
    step = step_model(decoder, target, 1, 1, MAX_TOKENS, 8)
    past = next(value for value in step.model.graph.inputs if value.name == "past_key_values.0.key")
    assert [node.op_type for node in past.consumers()] == ["ScatterElements"]
    several = step_model(decoder, target, 1, 8, MAX_TOKENS, 8)
    past = next(value for value in several.model.graph.inputs if value.name == "past_key_values.0.key")
    assert sorted(node.op_type for node in past.consumers()) == ["Concat", "ScatterElements"]


def test_rotary_positions_and_groups(tmp_path: Path) -> None:
    """A Llama, whose two heads of keys each serve two of queries."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS, "max_position_embeddings": 64}
    model = language_model("LlamaForCausalLM", num_attention_heads=HEADS, num_key_value_heads=2, **sizes)
    path = exported(model, tmp_path / "llama.onnx", 2)
    generator = prefuse.compile_generation(path, max_tokens=MAX_TOKENS, prefill=(4, 8), batch=2, threads=2, cache=False)
    texts = np.array([continued(model, prompt, 12) for prompt in PROMPTS])
    np.testing.assert_array_equal(generator.generate(PROMPTS, 12), texts)


GROUPED_WIDTH = 64  # as ONNX Runtime's kernel wants it


def grouped(path: Path, *, groups: int = 2) -> Path:
    """A decoder of one layer as ONNX Runtime's tools write them: GroupQueryAttention writes its caches itself."""
    rng = np.random.default_rng(3)
    size = GROUPED_WIDTH // HEADS
    angles = np.outer(np.arange(64), 100.0 ** (-np.arange(0, size, 2) / size))
    weights = {
        "table": 2 * rng.standard_normal((VOCABULARY, GROUPED_WIDTH)),
        "wq": rng.standard_normal((GROUPED_WIDTH, GROUPED_WIDTH)) / 3,
        "wk": rng.standard_normal((GROUPED_WIDTH, groups * size)) / 3,
        "wv": rng.standard_normal((GROUPED_WIDTH, groups * size)) / 3,
        "head": rng.standard_normal((GROUPED_WIDTH, VOCABULARY)),
        "cos": np.cos(angles),
        "sin": np.sin(angles),
    }
    constants = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    constants += [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in (("one", [1]), ("at", 1))]
    attention = ["q", "k", "v", "past_key_values.0.key", "past_key_values.0.value", "seqlens", "total", "cos", "sin"]
    node = helper.make_node
    nodes = [
        node("ReduceSum", ["attention_mask", "one"], ["sums"], keepdims=0),
        node("Sub", ["sums", "one"], ["before"]),
        node("Cast", ["before"], ["seqlens"], to=TensorProto.INT32),
        node("Shape", ["attention_mask"], ["sizes"]),
        node("Gather", ["sizes", "at"], ["keys"]),
        node("Cast", ["keys"], ["total"], to=TensorProto.INT32),
        node("Gather", ["table", "input_ids"], ["x"]),
        *(node("MatMul", ["x", f"w{one}"], [one]) for one in "qkv"),
        node(
            "GroupQueryAttention",
            attention,
            ["y", "present.0.key", "present.0.value"],
            domain="com.microsoft",
            num_heads=HEADS,
            kv_num_heads=groups,
            do_rotary=1,
        ),
        node("Add", ["x", "y"], ["sum"]),
        node("MatMul", ["sum", "head"], ["logits"]),
    ]
    info, kind = helper.make_tensor_value_info, TensorProto.FLOAT
    caches = [("past_key_values.0", "past"), ("present.0", "total")]
    (pasts, presents) = (
        [info(f"{name}.{part}", kind, ["batch", groups, rows, size]) for part in ("key", "value")] for name, rows in caches
    )
    tokens = [
        info("input_ids", TensorProto.INT64, ["batch", "new"]),
        info("attention_mask", TensorProto.INT64, ["batch", "total"]),
    ]
    logits = info("logits", kind, ["batch", "new", VOCABULARY])
    graph = helper.make_graph(nodes, "grouped", [*tokens, *pasts], [logits, *presents], constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def continued_by_onnxruntime(path: Path, prompt: list[int], n: int, groups: int = 2) -> list[int]:
    """Greedy, each step with its past."""
    session = pytest.importorskip("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    past = [np.zeros((1, groups, 0, GROUPED_WIDTH // HEADS), np.float32)] * 2
    tokens, made, seen = prompt, list[int](), 0
    for _ in range(n):
        seen += len(tokens)
        names = ("past_key_values.0.key", "past_key_values.0.value")
        given = {
            "input_ids": np.array([tokens]),
            "attention_mask": np.ones((1, seen), np.int64),
            **dict(zip(names, past, strict=True)),
        }
        logits, *past = session.run(None, given)
        made.append(int(logits[0, -1].argmax()))
        tokens = made[-1:]
    return made


def test_caches_that_the_file_writes_itself(tmp_path: Path) -> None:
    path = grouped(tmp_path / "grouped.onnx")
    generator = prefuse.compile_generation(path, max_tokens=MAX_TOKENS, prefill=(4, 8), batch=2, threads=2, cache=False)
    texts = [continued_by_onnxruntime(path, prompt, 20) for prompt in PROMPTS]
    assert len(set(texts[0])) > 4
    np.testing.assert_array_equal(generator.generate(PROMPTS, 20), texts)
    n = MAX_TOKENS + 1 - len(PROMPTS[0])
    np.testing.assert_array_equal(generator.generate(PROMPTS, n)[0], continued_by_onnxruntime(path, PROMPTS[0], n))


@pytest.mark.parametrize("is_grouped", [False, True])
def test_tables_of_positions_end_texts(is_grouped: bool, gpt2_file: Path, tmp_path: Path) -> None:
    """Learned positions, which are an input, and angles by what the mask counts: 64 of each."""
    path, rows = (grouped(tmp_path / "grouped.onnx"), "64 rows") if is_grouped else (gpt2_file, "wpe.weight has 64 rows")
    target, decoder = Target.parse("cpu"), find_decoder(import_model(path))
    check_position_tables(step_model(decoder, target, 2, 1, 64, 8), 64, target)
    with pytest.raises(OptionError, match=f"max_tokens: 70 given, and .*{rows}.*; give at most 64"):
        prefuse.compile_generation(path, max_tokens=70, prefill=(8,), batch=2, cache=False)


def changed(path: Path, to: Path, change: Any) -> Path:
    proto = onnx.load(path)
    change(proto.graph)
    onnx.save(proto, to)
    return to


def test_files_that_are_no_decoders_are_named(tmp_path: Path) -> None:
    path, to = grouped(tmp_path / "grouped.onnx"), tmp_path / "changed.onnx"
    other = helper.make_tensor_value_info("token_type_ids", TensorProto.INT64, ["batch", "new"])
    flat = helper.make_tensor_value_info("past_key_values.0.key", TensorProto.FLOAT, ["batch", "heads", "past", 16])
    hidden = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "new", GROUPED_WIDTH]) for name in ("x", "sum")]
    wrong: dict[str, Any] = {
        "input token_type_ids: no generator": lambda graph: graph.input.append(other),
        "input past_key_values.0.value: no output renews it": lambda graph: graph.output.remove(graph.output[2]),
        "input past_key_values.0.key: its shape is": lambda graph: graph.input[2].CopyFrom(flat),
        "outputs: x, sum beside the caches": lambda graph: (graph.output[0].CopyFrom(hidden[0]), graph.output.append(hidden[1])),
    }
    for message, change in wrong.items():
        with pytest.raises(UnsupportedModelError, match=message):
            find_decoder(import_model(changed(path, to, change)))
    with pytest.raises(OptionError, match="no position_ids"):
        prefuse.compile_generation(path, max_tokens=MAX_TOKENS, prefill=(), cache=False)


@pytest.mark.parametrize(("window", "prefill"), [(96, (8, 63)), (32, ())])
def test_masks_by_the_places_of_keys_in_the_caches_are_refused(window: int, prefill: tuple[int, ...], tmp_path: Path) -> None:
    """A sliding window in a file is of where keys lie, which is not where they were: pieces behind a past would not see it."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS, "max_position_embeddings": 128}
    model = language_model("MistralForCausalLM", num_attention_heads=HEADS, num_key_value_heads=2, sliding_window=window, **sizes)
    path = exported(model, tmp_path / "mistral.onnx", 2)
    with pytest.raises(UnsupportedModelError, match=r"where keys lie in the caches|not those of the file"):
        prefuse.compile_generation(path, max_tokens=63, prefill=prefill, threads=2, cache=False)


def test_steps_alone_are_compared_with_the_file(gpt2: Any, gpt2_file: Path) -> None:
    generator = prefuse.compile_generation(gpt2_file, max_tokens=MAX_TOKENS, prefill=(), threads=2, cache=False)
    assert generator.generate(PROMPTS[0], 12)[0].tolist() == continued(gpt2, PROMPTS[0], 12)


def test_inputs_that_follow_from_the_others(gpt2: Any, gpt2_file: Path, tmp_path: Path) -> None:
    """Places of the new tokens for all sequences, and how many logits are kept; hidden states beside the logits."""

    def change(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            node.output[:] = ["all_logits" if name == "logits" else name for name in node.output]
        kept = [value for value in graph.input if value.name != "position_ids"]
        places = helper.make_tensor_value_info("cache_position", TensorProto.INT64, ["sequence"])
        count = helper.make_tensor_value_info("num_logits_to_keep", TensorProto.INT64, [])
        del graph.input[:]
        graph.input.extend([*kept, places, count])
        constants = {"row": np.array([0]), "end": np.array([2**63 - 1]), "axis": np.array([1]), "flat": np.array([1])}
        graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
        graph.node.insert(0, helper.make_node("Unsqueeze", ["cache_position", "row"], ["position_ids"]))
        graph.node.extend([
            helper.make_node("Neg", ["num_logits_to_keep"], ["minus"]),
            helper.make_node("Reshape", ["minus", "flat"], ["begin"]),
            helper.make_node("Slice", ["all_logits", "begin", "end", "axis"], ["logits"]),
        ])  # fmt: skip
        graph.output.append(helper.make_tensor_value_info("all_logits", TensorProto.FLOAT, ["batch", "sequence", VOCABULARY]))

    path = changed(gpt2_file, tmp_path / "more.onnx", change)
    generator = prefuse.compile_generation(path, max_tokens=MAX_TOKENS, prefill=(8,), cache=False)
    for prompt in PROMPTS:
        assert generator.generate(prompt, 12)[0].tolist() == continued(gpt2, prompt, 12)
    with pytest.raises(UnsupportedModelError, match="input cache_position: it tells one place for all sequences"):
        prefuse.compile_generation(path, max_tokens=MAX_TOKENS, prefill=(8,), batch=2, cache=False)


def test_logits_of_the_last_token_alone_are_refused(gpt2_file: Path, tmp_path: Path) -> None:
    def cut(graph: onnx.GraphProto) -> None:
        (made,) = (output for output in graph.output if output.name == "logits")
        for node in graph.node:
            node.output[:] = ["all_logits" if name == "logits" else name for name in node.output]
        for name, value in (("first", -1), ("last", 2**31 - 1), ("axis", 1)):
            graph.initializer.append(onnx.numpy_helper.from_array(np.array([value]), name))
        graph.node.append(onnx.helper.make_node("Slice", ["all_logits", "first", "last", "axis"], ["logits"]))
        made.type.tensor_type.shape.dim[1].dim_value = 1

    path = changed(gpt2_file, tmp_path / "last.onnx", cut)
    with pytest.raises(UnsupportedModelError, match=r"output logits: it is .* for 4 tokens .*; export the logits of all tokens"):
        prefuse.compile_generation(path, max_tokens=MAX_TOKENS, prefill=(4,), cache=False)


def test_places_counted_by_the_length_of_the_past_are_refused(gpt2: Any, tmp_path: Path) -> None:
    path = exported(gpt2, tmp_path / "gpt2.onnx", HEADS, has_positions=False)
    with pytest.raises(UnsupportedModelError, match="counted by the length of the past"):
        prefuse.compile_generation(path, max_tokens=MAX_TOKENS, prefill=(8,), cache=False)
