"""Modules that take and give complex numbers: programs have their real and imaginary parts, callers do not see that."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
import prefuse
import pytest
import torch
from prefuse.runtime.errors import UnsupportedModelError
from torch import Tensor

from .applied import Applied, check

HARD = torch.tensor([50 + 3j, -100 - 0.5j, 1e-3 + 2j, 1j, 0j, 30j, -3 + 0j], dtype=torch.complex64)


class SpectralConvolution(torch.nn.Module):
    """The middle of a Fourier neural operator: low frequencies of an image mixed by complex weights, the rest 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 4, 5, 5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.einsum("bixy,ioxy->boxy", torch.fft.rfft2(x)[..., :5, :5], self.weight)
        spectrum = torch.zeros(x.shape[0], 4, x.shape[2], x.shape[3] // 2 + 1, dtype=torch.complex64)
        spectrum[..., :5, :5] = mixed
        image: Tensor = torch.fft.irfft2(spectrum, s=x.shape[-2:])
        return image


def state_space(x: Tensor) -> Tensor:
    """A diagonal state space (S4D): a convolution by its kernel, a sum of powers of complex numbers, in frequencies."""
    a = torch.complex(-torch.linspace(0.1, 1, 16), torch.linspace(0, 3, 16))
    c = torch.complex(torch.linspace(1, 2, 16), torch.linspace(0, 1, 16))
    kernel = torch.einsum("n,nl->l", c, torch.exp(a[:, None] * torch.arange(64) * 0.1)).real * 2
    found: Tensor = torch.fft.irfft(torch.fft.rfft(x, n=128) * torch.fft.rfft(kernel, n=128), n=128)[..., :64]
    return found


def rotated(x: Tensor) -> Tensor:
    """Positions as rotations of pairs, as Llama's first code has them."""
    turns = torch.polar(torch.ones(10, 4), torch.outer(torch.arange(10.0), torch.linspace(0.1, 1, 4)))
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2)


def quieter(x: Tensor) -> tuple[Tensor, Tensor]:
    """A sound of half its magnitude, and the logarithms of these."""
    window = torch.hann_window(16)
    spectrum = torch.stft(x, 16, hop_length=5, window=window, return_complex=True)
    half = torch.polar(spectrum.abs() * 0.5, spectrum.angle())
    return torch.istft(half, 16, hop_length=5, window=window, length=60), torch.log(spectrum.abs() + 1)


def test_results_of_transforms() -> None:
    x = torch.randn(2, 64)
    check(torch.fft.rfft, x)
    check(lambda x: (torch.fft.fft(x).abs(), torch.fft.fft(x, dim=0)), x)
    check(lambda x: {"spectrum": torch.stft(x, 16, window=torch.hann_window(16), return_complex=True), "x": x * 2}, x)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_inputs(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, dtype=dtype)
    net = check(lambda x: (x * x, x.real, x.abs(), torch.view_as_real(x)), x)
    for other in (x * 3, x.conj(), x.T.contiguous().T, x[:, :1].expand(3, 4)):
        torch.testing.assert_close(net(other)[0], other * other)
    found = net(x.numpy())[0]
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.dtype(str(dtype).removeprefix("torch."))
    check(lambda x: x * x, torch.randn((), dtype=dtype))


def test_any_length() -> None:
    net = check(lambda x: x * 2j, torch.randn(3, 8, dtype=torch.complex64), dims={"inputs_0": {1: "T"}, "T": (2, 40)})
    for length in (2, 17, 40):
        x = torch.randn(3, length, dtype=torch.complex64)
        torch.testing.assert_close(net(x), x * 2j)


def test_an_exported_program_is_refused() -> None:
    """Its inputs would have another type than those it was exported for."""

    def doubled(x: Tensor) -> Tensor:
        return x * 2

    program = torch.export.export(Applied(doubled), (torch.randn(3, dtype=torch.complex64),))
    with pytest.raises(UnsupportedModelError, match="view_as_real"):
        prefuse.compile(program)


def test_networks_of_frequencies() -> None:
    check(SpectralConvolution().eval(), torch.randn(2, 3, 16, 12))
    check(state_space, torch.randn(2, 64), tolerance=1e-4)
    check(rotated, torch.randn(2, 10, 3, 8))
    check(quieter, torch.randn(2, 64))
    layers = torch.nn.Sequential(torch.nn.Conv1d(3, 6, 3, dtype=torch.complex64), torch.nn.Linear(10, 5, dtype=torch.complex64))
    layers.requires_grad_(False)
    check(lambda x: layers(torch.complex(x, 2 * x)).abs(), torch.randn(2, 3, 12))


@pytest.mark.parametrize(
    "function",
    [
        lambda z: (z.tanh(), (z * 0.1).sin(), torch.exp(z * 0.1), torch.log(z + 5), torch.sqrt(z), (z * 0.01).cosh()),
        lambda z: (z**2, z**3, (z + 1) ** -2, (z + 5) ** 0.5, 2 ** (z * 0.1)),
        lambda z: (
            (z + 1) * 1e25 / ((z + 2) * 1e25),
            (z + 1) * 1e-25 / ((z + 2) * 1e-25),
            1 / (z + 2),
            z / 2,
            z / z.abs().clamp(1),
        ),
        lambda z: (z + 1, 2 * z, z - 1j, z.conj(), z * z.conj(), z == z.conj(), z.sgn(), z.abs(), z.angle()),
        lambda z: ((z + 1).prod(), (z * 0.1 + 1).cumprod(0), z.cumsum(0), z.mean(), torch.outer(z, z.conj()).sum(0)),
        lambda z: (torch.stack([z, z * 2], -1), torch.cat([z, z]), z[torch.tensor([0, 3])], z.tile(2), z.flip(0), z.roll(1)),
        lambda z: (
            torch.where(z.real > 0, z, 0),
            z.masked_fill(z.imag > 0, 0),
            torch.nn.functional.pad(z, (1, 2)),
            torch.diag(z),
        ),
        lambda z: (
            z + torch.full((7,), 1 - 2j),
            z.index_copy(0, torch.tensor([1, 2]), z[:2]),
            z.unfold(0, 3, 2),
            torch.eye(7) @ z.abs(),
        ),
        lambda z: (torch.ones(7, dtype=z.dtype) * z, torch.index_put(z, (torch.tensor([1]),), z[3:4]), torch.log10(z + 200)),
        lambda z: (z.to(torch.complex128), z.real.to(torch.complex64) * z, torch.fft.fftshift(torch.fft.fft(z))),
    ],
    ids=["functions", "powers", "quotients", "parts", "sums", "places", "choices", "made", "stored", "types"],
)
def test_operators_of_complex_numbers(function: Callable[[Tensor], object]) -> None:
    """Their hard operands, too: where cosh overflows, and squares of divisors are infinite or 0."""
    check(function, HARD)


SMALL = torch.tensor([1e-5 + 0j, 1e-7 + 2e-6j, -3e-6 + 1e-5j, -2e-5 - 3e-5j], dtype=torch.complex64)


def test_digits_near_zero() -> None:
    check(lambda z: tuple(one * 1e5 for one in (z.tanh(), torch.expm1(z), torch.log1p(z), z.asin(), z.atanh())), SMALL)


INFINITE = [complex(inf, 0), complex(-inf, 0), complex(0, inf)]


@pytest.mark.parametrize(
    ("function", "operands"),
    [
        (lambda z: (1 / z, (1 + 1j) / z), [*INFINITE, complex(1, -inf), 1 + 1j]),
        (lambda z: (z**0, z**0.0), [*INFINITE, 0, 1 + 1j, complex(inf, inf)]),
        (lambda z: (z**2.0, z**3.0, z**0.5, z**2.5, z ** torch.full_like(z, 2.5)), [0, 1 + 1j, 1e-30, -4]),
        (lambda z: (torch.exp(z), torch.sigmoid(z)), [100, -100, complex(inf, 0), 1 + 3j, 0]),
        (torch.sqrt, [*INFINITE, -4, complex(-4, -0.0), 0, 1e-36, complex(-3e38, 1), 3e38 + 3e38j, complex(-inf, 1)]),
        (torch.log1p, [1e30 + 1e30j, -1, -1 + 1e-5j, -0.5 + 0.8j, 100, 3j]),
        (torch.expm1, [-100 + 1j, 3j, 50]),
        (lambda z: (z.acosh(), z.asin(), z.atanh()), [2, complex(2, -0.0), -2, 2j, -3 - 1e-4j, 1e20 + 1e20j, -1e20 + 1j]),
        (lambda z: (torch.all(z), torch.all(z[:2]), torch.any(z)), [1j, 1, 0, 1 + 1j]),
    ],
    ids=["quotients", "powers of 0", "powers", "exponentials", "roots", "logarithms", "less one", "inverses", "truths"],
)
def test_edges(function: Callable[[Tensor], object], operands: list[complex]) -> None:
    check(function, torch.tensor(operands, dtype=torch.complex64))
