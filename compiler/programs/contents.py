"""What a packed constant is, without packing it: a digest of its tensor, which is read once, and of its packing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ir.constants import MADE_OF, constant_tensor
from ..ir.facts import tensor_type
from .cache import compiler_version
from .digest import array_digest, combine

if TYPE_CHECKING:
    import onnx_ir as ir

    from ...runtime.plan import TensorType


def content_of(value: ir.Value, pack: object, kind: TensorType) -> str:
    """Equal for constants whose bytes are equal once they are packed, which gives type `kind`: of equal tensors, packed alike."""
    tensor = constant_tensor(value)
    assert tensor is not None, f"{value.name} is no constant"
    return combine("constant", compiler_version(), tensor_digest(tensor), str(tensor_type(value)), repr(pack), str(kind))


def tensor_digest(tensor: ir.TensorProtocol) -> str:
    """Digest of type, shape and elements of a tensor; of one that is made of others, of how, and of these."""
    made = getattr(tensor, "meta", {}).get(MADE_OF)
    if made is None:
        return array_digest(tensor.numpy())
    how, sources = made
    return combine(how, *map(tensor_digest, sources))
