"""Texts by OpenVINO, token by token, on a model that `openvino_decoder` made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import openvino

from .openvino_cpu import Compiled
from .weight_bits import UNKNOWN, check_weights

_TOKEN = 5


@dataclass
class OpenvinoText:
    """A batch of texts, each of `tokens` tokens after `rewind`. `precision` is OpenVINO's hint."""

    model: openvino.Model | Path
    batch: int
    tokens: int
    threads: int
    precision: str
    bits: int | None = None  # that its products have to read weights in
    _made: int = 0
    _compiled: Compiled = field(init=False)

    def __post_init__(self) -> None:
        """Compile the model, and read the prompt.

        Raises:
            ValueError: weights are not read in these bits: they were expanded when the model was compiled.
        """
        self._compiled = Compiled(self.model, self.threads, self.precision)
        if self.bits is not None:
            check_weights(weight_types(self._compiled.net), self.bits)
        self._order = np.arange(self.batch, dtype=np.int32)
        self.rewind()

    def rewind(self) -> None:
        """Begin the texts anew."""
        self._compiled.request.reset_state()
        self._run(self.tokens, 0)
        self._made = 0

    def step(self) -> None:
        """One token more of each text."""
        self._run(1, self.tokens + self._made)
        self._made += 1

    @property
    def facts(self) -> dict[str, str]:
        """Settings in effect, and in what types products read their weights."""
        types = ", ".join(f"{count} in {name}" for name, count in weight_types(self._compiled.net).most_common())
        return {**self._compiled.facts, "weights": types}

    def _run(self, count: int, before: int) -> None:
        places = np.broadcast_to(np.arange(before, before + count), (self.batch, count))
        self._compiled({
            "input_ids": np.full((self.batch, count), _TOKEN),
            "attention_mask": np.ones((self.batch, before + count), np.int64),
            "position_ids": places.copy(),
            "beam_idx": self._order,
        })  # fmt: skip


def weight_types(net: openvino.CompiledModel) -> Counter[str]:
    """In which types the products of a compiled model read their weights, as it is run."""
    found = Counter[str]()
    for node in net.get_runtime_model().get_ops():
        if _layer(node).startswith("FullyConnected"):
            is_told = node.get_input_size() > 1  # constants may be left out
            found[node.get_input_element_type(1).get_type_name() if is_told else UNKNOWN] += 1
    return found


def _layer(node: openvino.Node) -> str:
    """What a node of a runtime model is called there."""
    name = node.get_rt_info()["layerType"]
    return name if isinstance(name, str) else str(name.astype(str))
