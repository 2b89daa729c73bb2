"""Rows written into caches: in place, nothing but the rows, wherever they are, in every way that models write them."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import prefuse
import pytest
import torch
from onnx import helper
from prefuse.examples.models.gpt2 import GPT2, Config
from prefuse.examples.models.gpt2_decode import Decoder
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import Copy, Launch

HEADS, LENGTH, DEPTH = 3, 16, 8
SHAPE = (2, HEADS, LENGTH, DEPTH)


def cached(node: onnx.NodeProto, row: tuple[int, ...], where: tuple[int, ...], opset: int = 24) -> CompiledModel:
    """A program that writes rows into a state by one operator, and gives the sum over the cache's positions."""
    kinds = {
        "cache": (onnx.TensorProto.FLOAT, SHAPE),
        "row": (onnx.TensorProto.FLOAT, row),
        "at": (onnx.TensorProto.INT64, where),
    }
    axis = onnx.numpy_helper.from_array(np.array([2]), "axis")
    nodes = [node, helper.make_node("ReduceSum", ["new", "axis"], ["sum"], keepdims=0)]
    outputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("sum", "new")]
    inputs = [helper.make_tensor_value_info(name, *kind) for name, kind in kinds.items()]
    graph = helper.make_graph(nodes, "cached", inputs, outputs, [axis])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    net = prefuse.compile(model, states={"new": "cache"}, cache=False)
    assert isinstance(net, CompiledModel)
    return net


def assert_in_place(net: CompiledModel) -> None:
    """No step copies a state, and what writes one has the pair for it."""
    renewed = {buffer.name for buffer in net.plan.buffers if buffer.renews is not None}
    assert renewed
    for step in net.plan.steps:
        assert not isinstance(step, Copy)
        if isinstance(step, Launch):
            written = [number for number, region in enumerate(step.writes) if region.buffer in renewed]
            assert {pair[0] for pair in step.inplace} >= set(written)


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("rows", [1, 3])
def test_tensor_scatter(mode: str, rows: int) -> None:
    """At the front, in the middle, over the end, and at places where there is nothing to write."""
    net = cached(helper.make_node("TensorScatter", ["cache", "row", "at"], ["new"], mode=mode), (2, HEADS, rows, DEPTH), (2,))
    assert_in_place(net)
    rng, cache, session = np.random.default_rng(0), np.zeros(SHAPE, np.float32), net.context()
    for at in ((0, 5), (5, 0), (15, 14), (16, 2), (40, -1), (-2, 3)):
        row = rng.integers(-9, 9, (2, HEADS, rows, DEPTH)).astype(np.float32)
        for batch, first in enumerate(at):
            for number in range(rows):
                place = (first + number) % LENGTH if mode == "circular" else first + number
                if 0 <= place < LENGTH:
                    cache[batch, :, place] = row[batch, :, number]
        np.testing.assert_array_equal(session(row, np.array(at)), cache.sum(2))
        np.testing.assert_array_equal(session.states["cache"], cache)


def test_scatter_elements_and_nd() -> None:
    elements = cached(
        helper.make_node("ScatterElements", ["cache", "at", "row"], ["new"], axis=2), (2, HEADS, 1, DEPTH), (2, HEADS, 1, DEPTH)
    )
    slices = cached(helper.make_node("ScatterND", ["cache", "at", "row"], ["new"]), (2, HEADS, DEPTH), (2, HEADS, 3))
    rng = np.random.default_rng(1)
    for net, is_elements in ((elements, True), (slices, False)):
        assert_in_place(net)
        cache, session = np.zeros(SHAPE, np.float32), net.context()
        for place in (0, 7, -1, 15):
            row = rng.integers(-9, 9, (2, HEADS, DEPTH)).astype(np.float32)
            cache[:, :, place] = row
            if is_elements:
                session(row[:, :, None], np.full((2, HEADS, 1, DEPTH), place))
            else:
                session(row, np.stack(np.broadcast_arrays(*np.ogrid[:2, :HEADS], place), -1).astype(np.int64))
            np.testing.assert_array_equal(session.states["cache"], cache)


@pytest.mark.parametrize("is_swapped", [False, True])
def test_where_by_position(is_swapped: bool) -> None:
    """A position outside writes nothing, one below zero does not count from the end."""
    order = "at, range" if is_swapped else "range, at"
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[{",".join(map(str, SHAPE))}] cache, float[2,{HEADS},1,{DEPTH}] row, int64[1] at) =>
      (float[2,{HEADS},{LENGTH},{DEPTH}] new)
      <int64[{LENGTH}] range = {{{",".join(map(str, range(LENGTH)))}}}, int64[2] shape = {{{LENGTH}, 1}}> {{
      is = Equal({order})
      column = Reshape(is, shape)
      new = Where(column, row, cache)
    }}"""
    net = prefuse.compile(onnx.parser.parse_model(text), states={"new": "cache"}, cache=False)
    assert isinstance(net, CompiledModel)
    assert_in_place(net)
    assert any(kernel.template == "scatter" for kernel in net.plan.kernels)
    rng, cache = np.random.default_rng(2), np.zeros(SHAPE, np.float32)
    for place in (0, 15, 7, 16, -1, -16, 2**40, -(2**40)):
        row = rng.integers(-9, 9, (2, HEADS, 1, DEPTH)).astype(np.float32)
        if 0 <= place < LENGTH:
            cache[:, :, place] = row[:, :, 0]
        net(row, np.array([place]))
        np.testing.assert_array_equal(net.states["cache"], cache)


class Written(torch.nn.Module):
    """A cache that is written in one of the ways that torch knows."""

    cache: torch.Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("cache", torch.zeros(SHAPE))

    def forward(self, row: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        match self.way:
            case "index_copy_":
                self.cache.index_copy_(2, at, row)
            case "index_put_":
                self.cache[:, :, at] = row
            case "scatter_":
                self.cache.scatter_(2, at.view(1, 1, -1, 1).expand_as(row), row)
            case "index_add_":
                self.cache.index_add_(2, at, row)
            case _:
                is_it = (torch.arange(LENGTH) == at)[None, None, :, None]
                self.cache.copy_(torch.where(is_it, row, self.cache))
        return self.cache.sum(2)


@pytest.mark.parametrize(
    ("way", "places"),
    [
        ("index_copy_", ((0,), (15,), (7,))),
        ("index_copy_", ((3, 0, 9), (9, 8, 7))),
        ("index_put_", ((0,), (-1,), (7,))),
        ("scatter_", ((0,), (15,), (7,))),
        ("index_add_", ((4,), (4,), (0,))),
        ("where", ((0,), (15,), (7,))),
    ],
)
def test_torch_writes_rows(way: str, places: tuple[tuple[int, ...], ...]) -> None:
    module = Written(way)
    net, wanted = prefuse.compile(module, cache=False), copy.deepcopy(module)
    for at in places:
        row, index = torch.randint(-9, 9, (2, HEADS, len(at), DEPTH)).float(), torch.tensor(at)
        torch.testing.assert_close(net(row, index), wanted(row, index), rtol=0, atol=0)
    np.testing.assert_array_equal(net.states["cache"], wanted.cache.numpy())  # type: ignore[union-attr]
    if way != "index_add_":
        assert_in_place(net.programs[0])  # type: ignore[union-attr, arg-type]


def decoder(precision: str = "float32") -> tuple[Decoder, CompiledModel]:
    torch.manual_seed(0)
    config = Config(vocabulary=96, positions=64, width=64, layers=2, heads=2)
    module = Decoder(GPT2(config), config).eval()
    net = prefuse.compile(module, precision=precision, cache=False)
    program = net.specialize(torch.tensor([[0]]), torch.tensor([0]))  # type: ignore[union-attr]
    assert isinstance(program, CompiledModel)
    return module, program


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_a_decoder_says_what_the_whole_text_says(precision: str, tolerance: float) -> None:
    """Token by token, two sessions in turns, as the model does on all tokens at once in float64."""
    module, net = decoder(precision)
    assert_in_place(net)
    assert len(net.context().states) == 4
    texts = torch.randint(0, 96, (2, 20))
    with torch.no_grad():
        wanted = module.model.double()(texts).numpy()
    sessions = [net.context() for _ in texts]
    for position in range(texts.shape[1]):
        for text, session, logits in zip(texts, sessions, wanted, strict=True):
            got = session(text[position].reshape(1, 1).numpy(), np.array([position]))
            assert isinstance(got, np.ndarray)
            error = np.linalg.norm(got[0, 0] - logits[position]) / np.linalg.norm(logits[position])
            assert error <= tolerance


# A step of a program whose caches are read-only but for the pages of the row that the step writes, and the first one: a head's
# rows take whole pages, 64 positions of 256 bytes, 16 a page. (The first element of a cache is where the kernel finds out that it
# works in place.)
GUARDED = """
import ctypes, mmap, sys
import numpy as np
import prefuse
net, position, is_read_only = prefuse.load(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
session = net.context()
states = session.states
session(np.array([[1]]), np.array([position]))
libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
start, size = states.memory().address, net.plan.space("state").size_bytes
assert (page, start % page, size) == (4096, 0, 2 * 2 * 64 * 256)
writable = {place // page for head in range(4) for place in [head * 64 * 256 + position * 256]} | {0, size // 2 // page}
for number in range(size // page):
    if is_read_only or number not in writable:
        assert libc.mprotect(ctypes.c_void_p(start + number * page), ctypes.c_size_t(page), mmap.PROT_READ) == 0
session(np.array([[2]]), np.array([position]))
"""


@pytest.fixture(scope="module")
def step_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of a decoder's step."""
    torch.manual_seed(0)
    config = Config(vocabulary=96, positions=64, width=128, layers=1, heads=2)
    net = prefuse.compile(Decoder(GPT2(config), config).eval(), cache=False, threads=1).specialize(  # type: ignore[union-attr]
        torch.tensor([[0]]), torch.tensor([0])
    )
    assert isinstance(net, CompiledModel)
    path = tmp_path_factory.mktemp("step") / "step.prefuse"
    net.save(path)
    return path


@pytest.mark.parametrize(("position", "is_read_only"), [(0, False), (40, False), (63, False), (40, True)])
def test_a_step_writes_one_row_a_head(position: int, is_read_only: bool, step_file: Path) -> None:
    """In a process of its own, which the processor stops at a write elsewhere: it does so where nothing may be written at all."""
    command = [sys.executable, "-c", GUARDED, str(step_file), str(position), str(is_read_only)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode == 0) is not is_read_only, ended.stderr
    assert ended.returncode in (0, -11), ended.stderr


def test_a_static_cache_of_transformers_is_states() -> None:
    """A Llama that its library exports with a cache of fixed length, token by token as the library's own."""
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=96, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    cache = {"batch_size": 1, "max_cache_len": 32}
    model.generation_config = transformers.GenerationConfig(
        use_cache=True, cache_implementation="static", max_length=32, cache_config=cache
    )
    wanted = TorchExportableModuleWithStaticCache(copy.deepcopy(model))
    token, position = torch.tensor([[3]]), torch.tensor([0])
    with torch.no_grad():  # strictly: else torch takes the caches for constants
        exported = torch.export.export(TorchExportableModuleWithStaticCache(model), (token, None, position), strict=True)
    net = prefuse.compile(exported, cache=False)
    assert isinstance(net, CompiledModel)
    assert sum(name.startswith(("key_cache", "value_cache")) for name in net.states) == 4
    for at in range(6):
        token, position = torch.tensor([[7 * at + 3]]), torch.tensor([at])
        got = net(token, position)
        with torch.no_grad():
            torch.testing.assert_close(got, wanted(token, cache_position=position), rtol=1e-5, atol=1e-5)
    rows = [
        step for step in net.plan.steps if isinstance(step, Launch) and step.writes[0].buffer.startswith(("new:key", "new:val"))
    ]
    assert [step.inplace for step in rows] == [((0, 0),)] * 4
