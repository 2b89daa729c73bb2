"""Operands that do not fit each other, which onnx's inference lets through: kernels would read beyond them."""

from __future__ import annotations

import onnx_ir as ir
import prefuse
import pytest
from onnx import parser
from prefuse.compiler.ir.validity import check_nodes
from prefuse.runtime.errors import InvalidModelError

_HEADER = '<ir_version: 10, opset_import: ["": %d]>\n'
_X = "main (float[1,4,3] x, "
_LOSS = "main (float[2,3] x, int64[%d] t, float[%d] w) => (float y) { y = %s(x, t, w) }"
_QLINEAR = "uint8[1,2,3] x, float xs, uint8 xz, int8[4,2,1] w, float[%d] ws, int8[%d] wz, float ys, uint8 yz"
UNFIT = {
    "AffineGrid": "main (float[2,2,4] t) => (float[2,5,6,2] y) <int64[4] s={2,3,5,6}> { y = AffineGrid(t,s) }",
    "Attention": "main (float[1,2,4,8] q, float[2,2,6,8] k, float[2,2,6,8] v) => (float[1,2,4,8] y) { y = Attention(q,k,v) }",
    "heads": "main (float[1,3,4,8] q, float[1,2,6,8] k, float[1,2,6,8] v) => (float[1,3,4,8] y) { y = Attention(q,k,v) }",
    "BatchNormalization": _X
    + "float[4] s, float[4] b, float[2] m, float[4] v) => (float[1,4,3] y) { y = BatchNormalization(x,s,b,m,v) }",
    "of one channel": "main (float[4] x, float[4] s, float[1] b, float[1] m, float[1] v) => (float[4] y)"
    " { y = BatchNormalization(x,s,b,m,v) }",
    "InstanceNormalization": _X + "float[3] s, float[3] b) => (float[1,4,3] y) { y = InstanceNormalization(x,s,b) }",
    "GroupNormalization": _X + "float[2] s, float[2] b) => (float[1,4,3] y) { y = GroupNormalization<num_groups=2>(x,s,b) }",
    "groups of channels": _X + "float[4] s, float[4] b) => (float[1,4,3] y) { y = GroupNormalization<num_groups=3>(x,s,b) }",
    "LayerNormalization": _X + "float[4] s) => (float[1,4,3] y) { y = LayerNormalization<axis=-1>(x,s) }",
    "bias of a row": _X + "float[3] s, float[2] b) => (float[1,4,3] y) { y = LayerNormalization<axis=-1>(x,s,b) }",
    "Conv": _X + "float[5,4,1] w, float[3] b) => (float[1,5,3] y) { y = Conv(x,w,b) }",
    "window": _X + "float[5,4,3] w) => (float[1,5,2] y) { y = Conv<kernel_shape=[2]>(x,w) }",
    "ConvTranspose": _X + "float[4,5,1] w, float[3] b) => (float[1,5,3] y) { y = ConvTranspose(x,w,b) }",
    "PRelu": _X + "float[4] s) => (float[1,4,3] y) { y = PRelu(x,s) }",
    "Gemm": "main (float[2,4] x, float[4,5] w, float[3] c) => (float[2,5] y) { y = Gemm(x,w,c) }",
    "DequantizeLinear": "main (int8[2,4] x, float[3] s) => (float[2,4] y) { y = DequantizeLinear<axis=1>(x,s) }",
    "QuantizeLinear": "main (float[2,4] x, float[4] s, int8[3] z) => (int8[2,4] y) { y = QuantizeLinear<axis=1>(x,s,z) }",
    "blocks": "main (int8[2,4] x, float[2,3] s) => (float[2,4] y) { y = DequantizeLinear<axis=1,block_size=2>(x,s) }",
    "QLinearConv": f"main ({_QLINEAR % (3, 3)}) => (uint8[1,4,3] y) {{ y = QLinearConv(x,xs,xz,w,ws,wz,ys,yz) }}",
    "MatMulInteger": "main (uint8[2,3] x, uint8[3,4] w, uint8[3] a) => (int32[2,4] y) { y = MatMulInteger(x,w,a) }",
    "GatherElements": "main (float[2,3] x, int64[3,3] i) => (float[3,3] y) { y = GatherElements<axis=1>(x,i) }",
    "GatherND": "main (float[2,3] x, int64[3,3] i) => (float[3] y) { y = GatherND(x,i) }",
    "ScatterElements": "main (float[2,3] x, int64[2,2] i, float[2,1] u) => (float[2,3] y) { y = ScatterElements<axis=1>(x,i,u) }",
    "ScatterND": "main (float[2,3] x, int64[2,1] i, float[2,2] u) => (float[2,3] y) { y = ScatterND(x,i,u) }",
    "MaxUnpool": "main (float[1,1,2] x, int64[1,1,3] i) => (float[1,1,4] y) { y = MaxUnpool<kernel_shape=[2],strides=[2]>(x,i) }",
    "GridSample": "main (float[2,2,3,3] x, float[1,4,4,2] g) => (float[2,2,4,4] y) { y = GridSample(x,g) }",
    "coordinates": "main (float[1,2,3,3] x, float[1,4,4,3] g) => (float[1,2,4,4] y) { y = GridSample(x,g) }",
    "RoiAlign": "main (float[1,2,3,3] x, float[2,4] r, int64[3] b) => (float[2,2,1,1] y) { y = RoiAlign(x,r,b) }",
    "NonMaxSuppression": "main (float[1,5,4] b, float[1,2,6] s) => (int64[N,3] y) { y = NonMaxSuppression(b,s) }",
    "ReverseSequence": "main (float[4,3] x, int64[2] l) => (float[4,3] y) { y = ReverseSequence(x,l) }",
    "batches beyond the data": "main (float[4,3] x, int64[3] l) => (float[4,3] y) { y = ReverseSequence<batch_axis=-1>(x,l) }",
    "batches as steps": "main (float[4,3] x, int64[4] l) => (float[4,3] y) { y = ReverseSequence<batch_axis=0>(x,l) }",
    "steps alone": "main (float[3] x, int64[3] l) => (float[3] y) { y = ReverseSequence(x,l) }",
    "elements of a scalar": "main (float x, int64 i) => (float y) { y = GatherElements(x,i) }",
    "updates of a scalar": "main (float x, int64 i, float u) => (float y) { y = ScatterElements(x,i,u) }",
    "Pad": 'main (float[0,3] x) => (float[2,3] y) <int64[4] p={1,0,1,0}> { y = Pad<mode="reflect">(x,p) }',
    "Resize": "main (float[1,1,0,4] x) => (float[1,1,5,4] y) <int64[4] s={1,1,5,4}> { y = Resize(x, , , s) }",
    "CumSum": "main (float[2,3] x) => (float[2,3] y) <int64 a={2}> { y = CumSum(x,a) }",
    "several axes": "main (float[2,3] x) => (float[2,3] y) <int64[2] a={0,1}> { y = CumSum(x,a) }",
    "DeformConv": "main (float[1,2,4,4] x, float[2,2,2,2] w, float[1,7,3,3] o) => (float[1,2,3,3] y) { y = DeformConv(x,w,o) }",
    "RotaryEmbedding": _X[:-2]
    + ", float[1,4,2] c, float[1,4,2] s) => (float[1,4,3] y) { y = RotaryEmbedding<num_heads=1>(x,c,s) }",
    "NegativeLogLikelihoodLoss": _LOSS % (3, 3, "NegativeLogLikelihoodLoss"),
    "SoftmaxCrossEntropyLoss": _LOSS % (2, 2, "SoftmaxCrossEntropyLoss"),
    "Compress": "main (float[2,3] x, bool[7] c) => (float[N] y) { y = Compress(x,c) }",
    "Einsum": 'main (float[2,3] x, float[4,5] c) => (float[2,5] y) { y = Einsum<equation="ij,jk->ik">(x,c) }',
    "Col2Im": "main (float[1,5,4] x) => (float[1,1,3,3] y) <int64[2] i={3,3}, int64[2] b={2,2}> { y = Col2Im(x,i,b) }",
    "columns": "main (float[1,4,5] x) => (float[1,1,3,3] y) <int64[2] i={3,3}, int64[2] b={2,2}> { y = Col2Im(x,i,b) }",
    "DepthToSpace": "main (float[1,6,2,2] x) => (float[1,1,4,4] y) { y = DepthToSpace<blocksize=2>(x) }",
    "SpaceToDepth": "main (float[1,1,3,3] x) => (float[1,4,1,1] y) { y = SpaceToDepth<blocksize=2>(x) }",
    "LSTM": "main (float[6,2,3] x, float[1,16,3] w, float[1,16,4] r, float[1,15] b) => (float[6,1,2,4] y) { y = LSTM(x,w,r,b) }",
}


@pytest.mark.parametrize("text", UNFIT.values(), ids=UNFIT)
def test_operands_that_do_not_fit_are_refused(text: str) -> None:
    """By the rules alone, whatever onnx's inference says of it too."""
    with pytest.raises(InvalidModelError, match=r"has .*correct the model"):
        check_nodes(ir.from_onnx_text(_HEADER % 22 + text))


@pytest.mark.parametrize(
    ("opset", "text"),
    [
        (18, _X + "float[2] s, float[2] b) => (float[1,4,3] y) { y = GroupNormalization<num_groups=2>(x,s,b) }"),
        (
            22,
            "main (float[4] x, float[1] s, float[1] b, float[1] m, float[1] v) => (float[4] y)"
            " { y = BatchNormalization(x,s,b,m,v) }",
        ),
        (22, _X + "float[4,1] s) => (float[1,4,3] y) { y = LayerNormalization<axis=1>(x,s) }"),
        (22, _X + "float[4,1] s) => (float[1,4,3] y) { y = LayerNormalization<axis=-1>(x,s) }"),
        (22, _X + "float[1,1,3] s) => (float[1,4,3] y) { y = LayerNormalization<axis=-1>(x,s) }"),
        (22, _X + "float[4,1] s) => (float[1,4,3] y) { y = PRelu(x,s) }"),
        (22, "main (float[2,4] x, float[4,5] w, float[2,1] c) => (float[2,5] y) { y = Gemm(x,w,c) }"),
        (22, "main (float[2,3] x, bool[4] c) => (float[N] y) { y = Compress(x,c) }"),
        (22, 'main (float[2,1] x, float[4,5] c) => (float[2,5] y) { y = Einsum<equation="ij,jk->ik">(x,c) }'),
        (22, "main (float[3,3] x, int64[2,1] i, float[2,1] u) => (float[3,3] y) { y = ScatterElements<axis=1>(x,i,u) }"),
        (22, "main (float[2,3] x, float[1] s, int8 z) => (int8[2,3] y) { y = QuantizeLinear(x,s,z) }"),
        (22, "main (float[2,3] x) => (float[2,3] y) <int64[1] a={-2}> { y = CumSum(x,a) }"),
        (22, "main (float[4,3] x, int64[4] l) => (float[4,3] y) { y = ReverseSequence<batch_axis=0,time_axis=1>(x,l) }"),
        (22, "main (float[0,3] x) => (float[2,3] y) <int64[4] p={1,0,1,0}> { y = Pad(x,p) }"),
        (22, 'main (float[0,3] x) => (float[0,5] y) <int64[4] p={0,1,0,1}> { y = Pad<mode="reflect">(x,p) }'),
        (22, "main (float[2,2,3,3] x, int64[2,3,3] t) => (float y) { y = NegativeLogLikelihoodLoss(x,t) }"),
    ],
)
def test_what_fits_by_broadcast_is_taken(opset: int, text: str) -> None:
    check_nodes(ir.from_onnx_text(_HEADER % opset + text))


def test_a_model_is_checked_when_it_is_compiled() -> None:
    """This one was taken, and wrote behind an array."""
    with pytest.raises(InvalidModelError, match=r"u of shape \[2, 2\], where updates \[2, 3\] are asked for; correct the model"):
        prefuse.compile(parser.parse_model(_HEADER % 22 + UNFIT["ScatterND"]), cache=False)
