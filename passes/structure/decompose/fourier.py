"""DFT and STFT.

A transform of few points is one matrix product: n complex numbers, interleaved, are 2n real ones, and the matrix is constant. One
of n = a b points is b transforms of a points, a multiplication, and a transforms of b points (Cooley and Tukey, 1965). One of a
large prime number of points is a convolution by transforms of a power of two (Bluestein, 1970).
"""

from __future__ import annotations

from math import isqrt, prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import scalar_constant
from ....compiler.ir.facts import source_of
from ....runtime.errors import InvalidModelError
from .body import Body, ints
from .common import dims, dtype_of

_MAX_DIRECT = 128  # points of a transform that is one product: fewer multiply-adds would cost more in copies
_MAX_PRIME = 256  # a larger prime factor is a convolution


def dft(node: ir.Node) -> ir.Function | None:
    """A transform along one axis, cut or filled with zeros to `dft_length`; the axis is an input since opset 20."""
    body, shape = Body(node), dims(node.inputs[0])
    default_axis = 1 if (node.version or 20) < 20 else -2
    axis = scalar_constant(node.inputs[2]) if body.has_input(2) else node.attributes.get_int("axis", default_axis)
    inverse, onesided = (bool(node.attributes.get_int(name, 0)) for name in ("inverse", "onesided"))
    if not isinstance(axis, int) or shape[-1] not in (1, 2) or axis % len(shape) == len(shape) - 1:
        return None
    axis %= len(shape)
    default = 2 * (shape[axis] - 1) if inverse and onesided else shape[axis]
    length = scalar_constant(node.inputs[1]) if body.has_input(1) else default
    if not isinstance(length, int) or length < 1:
        return None
    transform = _Transform(body, dtype_of(node.inputs[0]))
    order = [*(d for d in range(len(shape) - 1) if d != axis), axis, len(shape) - 1]
    rows = body.transpose(transform.widened(body.input(0)), order)
    outer = [shape[d] for d in order[:-2]]
    rows = body.reshape(rows, [prod(outer), shape[axis], shape[-1]])
    result, points, parts = transform.write(rows, (prod(outer), shape[axis], shape[-1]), length, inverse, onesided)
    result = body.transpose(body.reshape(result, [*outer, points, parts]), [order.index(d) for d in range(len(order))])
    return body.function(transform.narrowed(result))


def stft(node: ir.Node) -> ir.Function | None:
    """Transforms of the frames of a signal, each multiplied by the window.

    The signal is [batch, length, 1 or 2], or [batch, length] as in ONNX Runtime.

    Raises:
        InvalidModelError: it has another number of dimensions.
    """
    body, shape = Body(node), dims(node.inputs[0])
    if len(shape) not in (2, 3):
        raise InvalidModelError(source_of(node), f"STFT of a signal of {len(shape)} dimensions", "give [batch, length, 1 or 2]")
    batch, length, parts = shape if len(shape) == 3 else (*shape, 1)
    step, given = (scalar_constant(node.inputs[at]) if body.has_input(at) else None for at in (1, 3))
    if not isinstance(step, int) or step < 1 or (body.has_input(3) and given is None):
        return None
    points = given if isinstance(given, int) else dims(node.inputs[2])[0] if body.has_input(2) else length
    frames = (length - points) // step + 1
    if not 0 < points <= length:
        return None
    transform = _Transform(body, dtype_of(node.inputs[0]))
    places = np.arange(frames, dtype=np.int64)[:, None] * step + np.arange(points, dtype=np.int64)
    signal = transform.widened(body.input(0))
    rows = body.op("Gather", signal if len(shape) == 3 else body.reshape(signal, [batch, length, 1]), places, axis=1)
    if body.has_input(2):
        rows = body.op("Mul", rows, body.reshape(transform.widened(body.input(2)), [points, 1]))
    rows = body.reshape(rows, [batch * frames, points, parts])
    onesided = bool(node.attributes.get_int("onesided", 1)) and parts == 1
    result, bins, _ = transform.write(rows, (batch * frames, points, parts), points, False, onesided)
    return body.function(transform.narrowed(body.reshape(result, [batch, frames, bins, 2])))


class _Transform:
    """Writes transforms of rows, [rows, points, 1 or 2] with the real and the imaginary parts last, in float32 or float64."""

    def __init__(self, body: Body, dtype: ir.DataType) -> None:
        self.body, self.dtype = body, dtype
        self.working = np.dtype(np.float64 if dtype == ir.DataType.DOUBLE else np.float32)

    def widened(self, value: ir.Value) -> ir.Value:
        return value if self.dtype.numpy() == self.working else self.body.cast(value, self.working.name)

    def narrowed(self, value: ir.Value) -> ir.Value:
        return value if self.dtype.numpy() == self.working else self.body.cast(value, self.dtype)

    def write(self, x: ir.Value, shape: tuple[int, int, int], n: int, inverse: bool, onesided: bool) -> tuple[ir.Value, int, int]:
        """The transform of `n` points: its value, and how many points and parts that has.

        One-sided, half of a transform whose other half is its conjugate: that of real numbers, or what is inverted to such.
        """
        rows, given, parts = shape
        bins, sign = n // 2 + 1, 1 if inverse else -1
        taken = bins if inverse and onesided else n
        x = self._fitted(x, given, taken, axis=1)
        if _is_direct(n):
            matrix = _roots(n, sign, taken, bins if onesided and not inverse else n) / (n if inverse else 1)
            if inverse and onesided:
                matrix[1 : (n + 1) // 2] *= 2  # a bin and its conjugate; the first has none, nor has the middle one
            made = 1 if inverse and onesided else 2
            return self._product(x, rows, matrix, parts, made), matrix.shape[1], made
        if parts == 1:
            x = self._fitted(x, 1, 2, axis=2)
        if inverse and onesided:
            x = self._mirrored(x, n)
        z = self._fast(x, rows, n, sign)
        if inverse:
            z = self.body.op("Mul", z, np.array(1 / n, self.working))
        if inverse and onesided:
            return self._fitted(z, 2, 1, axis=2), n, 1
        return (self._fitted(z, n, bins, axis=1), bins, 2) if onesided else (z, n, 2)

    def _fast(self, x: ir.Value, rows: int, n: int, sign: int) -> ir.Value:
        """The transform of complex rows, not divided by n."""
        if _is_direct(n):
            return self._product(x, rows, _roots(n, sign, n, n), 2, 2)
        a = _largest_factor(n)
        if a == 1:
            return self._convolved(x, rows, n, sign)
        b, body = n // a, self.body
        # x[j1 b + j2] -> over j1: [k1] for each j2 -> over j2: X[k1 + a k2]
        columns = body.transpose(body.reshape(x, [rows, a, b, 2]), [0, 2, 1, 3])
        inner = self._fast(body.reshape(columns, [rows * b, a, 2]), rows * b, a, sign)
        turned = self._times(body.reshape(inner, [rows, b, a, 2]), _roots(n, sign, b, a))
        outer = self._fast(body.reshape(body.transpose(turned, [0, 2, 1, 3]), [rows * a, b, 2]), rows * a, b, sign)
        return body.reshape(body.transpose(body.reshape(outer, [rows, a, b, 2]), [0, 2, 1, 3]), [rows, n, 2])

    def _convolved(self, x: ir.Value, rows: int, n: int, sign: int) -> ir.Value:
        """By Bluestein: with w(j) = e^(i pi j^2 / n), X[k] is w(k) times the convolution of x w and the conjugate of w."""
        m = 1 << (2 * n - 2).bit_length()
        chirp = np.exp(sign * 1j * np.pi * (np.arange(n, dtype=np.int64) ** 2 % (2 * n)) / n)
        kernel = np.zeros(m, complex)
        kernel[:n] = chirp.conj()
        kernel[m - n + 1 :] = chirp.conj()[:0:-1]
        spectrum = self._fast(self._fitted(self._times(x, chirp), n, m, axis=1), rows, m, -1)
        product = self._fast(self._times(spectrum, np.fft.fft(kernel) / m), rows, m, 1)
        return self._times(self._fitted(product, m, n, axis=1), chirp)

    def _product(self, x: ir.Value, rows: int, matrix: np.ndarray, parts: int, made: int) -> ir.Value:
        """Rows times a complex matrix, of which `parts` of each number are given and `made` of each are wanted."""
        real = np.stack([np.stack([matrix.real, matrix.imag], -1), np.stack([-matrix.imag, matrix.real], -1)], 1)
        taken, count = matrix.shape
        weights = real[:, :parts, :, :made].reshape(taken * parts, count * made).astype(self.working)
        product = self.body.op("MatMul", self.body.reshape(x, [rows, taken * parts]), weights)
        return self.body.reshape(product, [rows, count, made])

    def _times(self, z: ir.Value, factors: np.ndarray) -> ir.Value:
        """Complex numbers times constants: z re + i z im, where i z swaps the parts and turns the sign of the first."""
        straight = np.stack([factors.real, factors.real], -1).astype(self.working)
        crossed = np.stack([-factors.imag, factors.imag], -1).astype(self.working)
        swapped = self.body.op("Gather", z, ints([1, 0]), axis=-1)
        return self.body.op("Add", self.body.op("Mul", z, straight), self.body.op("Mul", swapped, crossed))

    def _mirrored(self, x: ir.Value, n: int) -> ir.Value:
        """All n bins from the first n // 2 + 1, whose conjugates are the others."""
        bins = n // 2 + 1
        every = self.body.op("Gather", x, ints([*range(bins), *range(n - bins, 0, -1)]), axis=1)
        signs = np.ones((n, 2), self.working)
        signs[bins:, 1] = -1
        return self.body.op("Mul", every, signs)

    def _fitted(self, x: ir.Value, given: int, wanted: int, axis: int) -> ir.Value:
        """One axis of rows cut, or filled up with zeros, to `wanted` elements."""
        if given > wanted:
            return self.body.op("Slice", x, ints([0]), ints([wanted]), ints([axis]))
        return x if given == wanted else self.body.op("Pad", x, ints([0, wanted - given]), None, ints([axis]))


def _is_direct(n: int) -> bool:
    return n <= _MAX_DIRECT or (n <= _MAX_PRIME and _largest_factor(n) == 1)


def _roots(n: int, sign: int, rows: int, columns: int) -> np.ndarray:
    """e^(sign 2 pi i j k / n) for j below `rows` and k below `columns`; from the remainder of j k, so that the angle is exact."""
    places = np.outer(np.arange(rows, dtype=np.int64), np.arange(columns, dtype=np.int64)) % n
    roots: np.ndarray = np.exp(sign * 2j * np.pi / n * places)
    return roots


def _largest_factor(n: int) -> int:
    """The largest divisor that is at most the square root."""
    return next(a for a in range(isqrt(n), 0, -1) if n % a == 0)
