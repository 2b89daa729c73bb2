"""The models that tests, demo and benchmarks use: self-contained PyTorch, seeded random weights."""

from __future__ import annotations

from . import bert, gpt2, gru, lenet, resnet, unet, vgg, vit
from .export import export_onnx
from .spec import Inputs, ModelSpec

__all__ = ["MODELS", "Inputs", "ModelSpec", "export_onnx"]

MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec("lenet5", lenet.lenet5, lenet.lenet5_small),
        ModelSpec("resnet18", resnet.resnet18, resnet.resnet18_small),
        ModelSpec("resnet50", resnet.resnet50, resnet.resnet50_small),
        ModelSpec("vgg16", vgg.vgg16, vgg.vgg16_small),
        ModelSpec("unet", unet.unet, unet.unet_small),
        ModelSpec("bert-base", bert.bert_base, bert.bert_base_small),
        ModelSpec("roberta-base", bert.roberta_base, bert.roberta_base_small),
        ModelSpec("gpt2", gpt2.gpt2, gpt2.gpt2_small),
        ModelSpec("vit-b16", vit.vit_b16, vit.vit_b16_small),
        ModelSpec("gru-seq2seq", gru.gru_seq2seq, gru.gru_seq2seq_small),
        ModelSpec("bigru-linear", gru.bigru_linear, gru.bigru_linear_small),
    )
}
