"""Every operator of com.microsoft: how it is rewritten, or why it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import (
    activations,
    attention,
    experts,
    group_query,
    low_bit,
    normalization,
    products,
    quantized,
    recurrent,
    rotary,
    tensors,
)
from .activations import Results
from .call import Call


@dataclass(frozen=True, slots=True)
class Operator:
    """How one operator is rewritten: by a function, which gives values for its outputs in order, in ONNX of at least an opset."""

    rewrite: Callable[[Call], Results]
    opset: int

    @property
    def summary(self) -> str:
        """What it computes: the first paragraph about it."""
        return " ".join((self.rewrite.__doc__ or "").strip().split("\n\n")[0].split())


_OPSET = 25  # Attention with windows, integers of two bits
_NEWER = {"CausalConvWithState": 27, "LinearAttention": 27}

OPERATORS: dict[str, Operator] = {
    name: Operator(rewrite, _NEWER.get(name, _OPSET))
    for name, rewrite in {
        "Attention": attention.attention,
        "BiasAdd": activations.bias_add,
        "BiasDropout": activations.bias_dropout,
        "BiasGelu": activations.bias_gelu,
        "BiasSplitGelu": activations.bias_split_gelu,
        "BranchwiseRMSNorm": normalization.branchwise_rms_norm,
        "CDist": tensors.cdist,
        "CausalConvWithState": recurrent.causal_convolution,
        "ComplexMul": tensors.complex_multiply,
        "ComplexMulConj": tensors.complex_multiply,
        "ConvTransposeWithDynamicPads": products.conv_transpose_with_dynamic_pads,
        "DecoderMaskedMultiHeadAttention": attention.decoder_masked_attention,
        "DequantizeLinear": quantized.dequantize_linear,
        "DynamicQuantizeLSTM": recurrent.dynamic_quantize_lstm,
        "DynamicQuantizeMatMul": quantized.dynamic_quantize_matmul,
        "EmbedLayerNormalization": normalization.embed_layer_normalization,
        "ExpandDims": tensors.expand_dims,
        "FastGelu": activations.fast_gelu,
        "FusedConv": products.fused_conv,
        "FusedGemm": products.fused_gemm,
        "FusedMatMul": products.fused_matmul,
        "FusedMatMulActivation": products.fused_matmul_activation,
        "GatedAdd": activations.gated_add,
        "GatedRMSNorm": normalization.gated_rms_norm,
        "GatedRelativePositionBias": tensors.gated_relative_position_bias,
        "GatherBlockQuantized": low_bit.gather_block_quantized,
        "GatherND": tensors.gather_nd,
        "Gelu": activations.gelu,
        "GemmFastGelu": products.gemm_fast_gelu,
        "GemmaRotaryEmbedding": rotary.gemma_rotary_embedding,
        "GridSample": tensors.grid_sample,
        "GroupNorm": normalization.group_norm,
        "GroupQueryAttention": group_query.group_query_attention,
        "IsAllFinite": tensors.is_all_finite,
        "LayerNormalization": normalization.layer_normalization,
        "LinearAttention": recurrent.linear_attention,
        "MRotaryEmbedding": rotary.multimodal_rotary_embedding,
        "MatMulBnb4": low_bit.matmul_bnb4,
        "MatMulInteger16": products.integer_matmul,
        "MatMulIntegerToFloat": quantized.matmul_to_float,
        "MatMulNBits": low_bit.matmul_n_bits,
        "MoE": experts.mixture_of_experts,
        "MulInteger": quantized.multiply_integers,
        "MultiHeadAttention": attention.multi_head_attention,
        "NhwcConv": products.nhwc_conv,
        "NhwcFusedConv": products.nhwc_fused_conv,
        "NhwcMaxPool": products.nhwc_max_pool,
        "Pad": tensors.pad,
        "QAttention": attention.quantized_attention,
        "QEmbedLayerNormalization": quantized.embed_layer_normalization,
        "QGemm": quantized.gemm,
        "QLinearAdd": quantized.binary,
        "QLinearAveragePool": quantized.average_pool,
        "QLinearConcat": quantized.concat,
        "QLinearConv": quantized.conv,
        "QLinearGlobalAveragePool": quantized.global_average_pool,
        "QLinearLeakyRelu": quantized.leaky_relu,
        "QLinearMul": quantized.binary,
        "QLinearReduceMean": quantized.reduce_mean,
        "QLinearSigmoid": quantized.sigmoid,
        "QLinearSoftmax": quantized.softmax,
        "QLinearWhere": quantized.where,
        "QMoE": experts.quantized_mixture_of_experts,
        "QuantizeLinear": quantized.quantize_linear,
        "QuickGelu": activations.quick_gelu,
        "Range": tensors.arange,
        "ReduceSumInteger": quantized.sum_integers,
        "RelativePositionBias": tensors.relative_position_bias,
        "Rfft": tensors.rfft,
        "RotaryEmbedding": rotary.rotary_embedding,
        "ScaledSiLU": activations.scaled_silu,
        "SimplifiedLayerNormalization": normalization.simplified_layer_normalization,
        "SkipGroupNorm": normalization.skip_group_norm,
        "SkipLayerNormalization": normalization.skip_layer_normalization,
        "SkipSimplifiedLayerNormalization": normalization.skip_simplified_layer_normalization,
        "TorchEmbedding": tensors.embedding,
        "TransposeMatMul": products.fused_matmul,
        "Trilu": tensors.trilu,
        "UnfoldTensor": tensors.unfold,
        "Unique": tensors.unique,
    }.items()
}

_GENERATES = "a whole decoding loop in one operator; export the decoder alone and loop outside"
_PADDING = "works on sequences without padding, whose layout only ONNX Runtime's GPU kernels have"
_PAGED = "attends to blocks that only a run chooses"
_DEVICE = "made for the memory layout of one GPU kernel"
_TRAINING = "a random operator of training"
_TEXT = "strings are not computed with"
_COMPILED = "holds code of another compiler"

_NEW = "not taken yet; export its float operators"
_CPU = "saved for the CPU that it ran on; save the model with ONNX Runtime's extended optimizations at most"
REFUSED_DOMAINS: dict[str, str] = {"com.microsoft.nchwc": _CPU, "com.ms.internal.nhwc": _CPU}

REFUSED: dict[str, str] = {
    "AttnLSTM": "an LSTM with attention inside, which no exporter makes today",
    "BeamSearch": _GENERATES,
    "BiasSoftmax": "made by ONNX Runtime's GPU optimizer only; save the model with the CPU provider",
    "BifurcationDetector": "its result's size is decided by a run, for speculative decoding",
    "BitmaskBiasDropout": _TRAINING,
    "BitmaskDropout": _TRAINING,
    "CropAndResize": "an image operator that no exporter makes today; use RoiAlign",
    "DecoderAttention": "replaced by MultiHeadAttention",
    "DecoderMaskedSelfAttention": "its cache is laid out for one GPU kernel; save the model with the CPU provider",
    "DequantizeBFP": _DEVICE,
    "DequantizeWithOrder": _DEVICE,
    "DynamicSparseAttention": _PAGED,
    "DynamicTimeWarping": "a search along a path that only a run knows",
    "EPContext": _COMPILED,
    "EngramGate": _NEW,
    "GatedDeltaNet": _NEW,
    "GemmFloat8": _DEVICE,
    "GreedySearch": _GENERATES,
    "HyperConnectionPostMix": _NEW,
    "HyperConnectionPreMix": _NEW,
    "Inverse": "the inverse of a matrix is not computed; export what it is multiplied with as a solution",
    "Irfft": "use ONNX's DFT with inverse=1",
    "LinearAttentionGate": _NEW,
    "LongformerAttention": _DEVICE,
    "MatMulBlockQuantizedFp4Weight": _DEVICE,
    "MatMulBlockQuantizedFp8Weight": _DEVICE,
    "MatMulFpQ4": _DEVICE,
    "MatMulNBitsMlp": _DEVICE,
    "MatMulNBitsQkv": _DEVICE,
    "MaxpoolWithMask": "for ONNX Runtime's internal use",
    "MurmurHash3": _TEXT,
    "NGramHashMapping": _NEW,
    "NGramRepeatBlock": "part of a decoding loop; loop outside",
    "PackedAttention": _PADDING,
    "PackedMultiHeadAttention": _PADDING,
    "PackedSparseAttentionIndexer": _PAGED,
    "PagedAttention": _PADDING,
    "QOrderedAttention": _DEVICE,
    "QOrderedGelu": _DEVICE,
    "QOrderedLayerNormalization": _DEVICE,
    "QOrderedLongformerAttention": _DEVICE,
    "QOrderedMatMul": _DEVICE,
    "QuantizeBFP": _DEVICE,
    "QuantizeWithOrder": _DEVICE,
    "RemovePadding": _PADDING,
    "RestorePadding": _PADDING,
    "SampleOp": "a sample of ONNX Runtime's documentation",
    "Sampling": _GENERATES,
    "Snpe": _COMPILED,
    "SparseAttention": _PAGED,
    "SparseAttentionIndexer": _PAGED,
    "SparsePagedAttention": _PAGED,
    "SparseToDenseMatMul": "sparse tensors are not taken; store them as dense ones",
    "Tokenizer": _TEXT,
    "VarlenCausalConvWithState": _PADDING,
    "VarlenNGramHashMapping": _NEW,
    "WhisperBeamSearch": _GENERATES,
    "WordConvEmbedding": "embeds characters of words, which no exporter makes today",
}
