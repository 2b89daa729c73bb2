"""Generated models: one operator, or up to eight of many kinds that read each other, each with numbers to run on.

A model is made again from its seed and number alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from .draft import Draft, NotPossibleError
from .judge import Sample
from .recipes import RECIPES

_OPSETS = (*range(7, 13), *range(13, 27), *range(13, 27))  # the newer ones twice as often


@dataclass(frozen=True)
class Generated(Sample):
    """A generated model's file, and what it is run on."""

    seed: int = 0
    number: int = 0

    def built(self) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        return generated_model(self.seed, self.number)


def generated_models(count: int, seed: int = 0) -> Iterator[Sample]:
    """`count` valid models; they are built where they are written."""
    for number in range(count):
        yield Generated(f"generated {seed}:{number}", _Writer(seed, number), seed=seed, number=number)


@dataclass(frozen=True)
class _Writer:
    seed: int
    number: int

    def __call__(self, folder: Path) -> Path:
        model, _ = generated_model(self.seed, self.number)
        path = folder / "model.onnx"
        onnx.save(model, path)
        return path


def generated_model(seed: int, number: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The model of a number, and its inputs."""
    rng = np.random.default_rng([seed, number])
    while True:
        draft = Draft(rng, int(rng.choice(_OPSETS)), odd=bool(rng.random() < 0.25))
        count = 1 if rng.random() < 0.55 else int(rng.integers(2, 9))
        try:
            _fill(draft, count)
            model = draft.finished()
        except NotPossibleError:
            continue
        is_standard = not any(node.domain for node in draft.nodes)  # others are rewritten where widths are known
        if is_standard and draft.chance(0.2):
            _forget_sizes(model)
        return model, draft.feeds


def _fill(draft: Draft, count: int) -> None:
    """Add this many recipes; of those that are not possible another is tried."""
    tries = 0
    while count and tries < 30:
        tries += 1
        try:
            draft.pick(RECIPES)(draft)
            count -= 1
        except NotPossibleError:
            continue
    if not draft.nodes:
        raise NotPossibleError("nothing")
    _forget_unread(draft)


def _forget_sizes(model: onnx.ModelProto) -> None:
    """Give all dimensions of inputs names in place of sizes, and those of outputs nothing, as exporters of dynamic models do."""
    inputs = len(model.graph.input)
    for position, info in enumerate((*model.graph.input, *model.graph.output)):
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            dim.Clear()
            if position < inputs:
                dim.dim_param = f"{info.name}_{axis}"


def _forget_unread(draft: Draft) -> None:
    """Drop the inputs and constants that a recipe made before it failed."""
    read = {name for node in draft.nodes for name in [*node.input, *captured_names(node)]}
    draft.inputs = [info for info in draft.inputs if info.name in read]
    draft.initializers = [tensor for tensor in draft.initializers if tensor.name in read]
    draft.feeds = {name: array for name, array in draft.feeds.items() if name in read}


def captured_names(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node's graphs read, those of their own among them."""
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from inner.input
            yield from captured_names(inner)
        yield from (output.name for output in attribute.g.output)
