"""What a packed constant is, without packing it: a digest of its tensor, which is read once, and of its packing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...runtime.files.checksum import Checksum
from ..ir.constants import constant_tensor, contiguous
from ..ir.facts import tensor_type
from .cache import compiler_version
from .digest import array_digest, combine

if TYPE_CHECKING:
    import onnx_ir as ir

    from ...runtime.plan import TensorType

_KEY = "prefuse.digest"  # of a tensor's `meta`: its checksum, and its digest


def content_of(value: ir.Value, pack: object, kind: TensorType) -> str:
    """Equal for constants whose bytes are equal once they are packed, which gives type `kind`: of equal tensors, packed alike."""
    tensor = constant_tensor(value)
    assert tensor is not None, f"{value.name} is no constant"
    return combine("constant", compiler_version(), tensor_digest(tensor), str(tensor_type(value)), repr(pack), str(kind))


def tensor_digest(tensor: ir.TensorProtocol) -> str:
    """Digest of type, shape and elements of a tensor.

    It is kept with the tensor, and taken from there as long as the elements have the same checksum: they may be a parameter of
    a module, which its user changes in place.
    """
    array = tensor.numpy()
    checksum = Checksum()
    checksum.update(contiguous(array).reshape(-1).view(np.uint8).data)
    found = tensor.meta.get(_KEY)
    if found is None or found[0] != checksum.hexdigest():
        found = tensor.meta[_KEY] = checksum.hexdigest(), array_digest(array)
    return str(found[1])
