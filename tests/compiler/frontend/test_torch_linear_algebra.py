"""Small linear systems, factors and determinants: as torch has them, and in double precision to its digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import prefuse
import pytest
import torch
from prefuse.runtime.errors import UnsupportedModelError
from torch import nn

random = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=random)


class Calling(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *operands: torch.Tensor) -> Any:
        return self.function(*operands)


def check(function: Callable[..., Any], *operands: torch.Tensor, rtol: float = 2e-4, atol: float = 2e-4) -> None:
    net: Any = prefuse.compile(Calling(function), operands, threads=1, cache=False)
    made, expected = net(*operands), function(*operands)
    for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (made, expected)), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)


A, B = normal(3, 5, 5), normal(3, 5, 2)
POSITIVE = A @ A.mT + torch.eye(5)
FACTOR = torch.linalg.cholesky(POSITIVE)
TRIANGLE = A + 3 * torch.eye(5)
linalg = torch.linalg

SYSTEMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "inv": (linalg.inv, (A,)),
    "inverse of one": (torch.inverse, (A[0],)),
    "inv_ex": (linalg.inv_ex, (A,)),
    "of one element": (linalg.inv, (normal(2, 1, 1),)),
    "of rows in reverse": (linalg.inv, (torch.eye(5).flip(0),)),
    "solve": (linalg.solve, (A, B)),
    "solve for a vector": (linalg.solve, (A[0], B[0, :, 0])),
    "solve for vectors": (linalg.solve, (A, B[..., 0])),
    "solve by one for all": (linalg.solve, (A[0], B)),
    "solve from the right": (lambda a, b: linalg.solve(a, b, left=False), (A, B.mT.contiguous())),
    "solve_ex": (linalg.solve_ex, (A, B)),
    "tensorsolve": (lambda a, b: linalg.tensorsolve(a.reshape(2, 3, 6), b), (normal(6, 6), normal(2, 3))),
    "matrix_power": (lambda a: linalg.matrix_power(a, -2), (A,)),
    "cholesky": (linalg.cholesky, (POSITIVE,)),
    "upper cholesky": (lambda a: linalg.cholesky(a, upper=True), (POSITIVE,)),
    "cholesky of a triangle": (linalg.cholesky, (POSITIVE.tril(),)),
    "cholesky_ex": (linalg.cholesky_ex, (POSITIVE,)),
    "upper triangle": (lambda a, b: linalg.solve_triangular(a, b, upper=True), (TRIANGLE, B)),
    "lower triangle": (lambda a, b: linalg.solve_triangular(a, b, upper=False), (TRIANGLE, B)),
    "triangle from the right": (
        lambda a, b: linalg.solve_triangular(a, b, upper=False, left=False),
        (TRIANGLE, B.mT.contiguous()),
    ),
    "ones on the diagonal": (lambda a, b: linalg.solve_triangular(a, b, upper=True, unitriangular=True), (A, B)),
    "ones on one diagonal for all": (
        lambda a, b: linalg.solve_triangular(a, b, upper=False, unitriangular=True),
        (A[0], B),
    ),
    "one right side of ones": (lambda a, b: linalg.solve_triangular(a, b, upper=True, unitriangular=True), (A, B[0])),
    "one triangle for all": (lambda a, b: linalg.solve_triangular(a, b, upper=True), (TRIANGLE[0], B)),
    "cholesky_solve": (lambda factor, b: torch.cholesky_solve(b, factor), (FACTOR, B)),
    "upper cholesky_solve": (lambda factor, b: torch.cholesky_solve(b, factor, upper=True), (FACTOR.mT.contiguous(), B)),
    "cholesky_inverse": (torch.cholesky_inverse, (FACTOR,)),
    "slogdet": (linalg.slogdet, (A,)),
    "logdet": (torch.logdet, (POSITIVE,)),
    "logdet of what may be negative": (torch.logdet, (A,)),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_systems(name: str) -> None:
    function, operands = SYSTEMS[name]
    check(function, *operands)


def test_many_rows_in_double_precision() -> None:
    """Rows are exchanged: without that, small pivots lose digits."""
    a, b = normal(30, 30).double(), normal(30, 3).double()
    a[0, 0] = 1e-14
    check(linalg.solve, a, b, rtol=1e-9, atol=1e-11)


def test_what_has_no_solution_is_told() -> None:
    singular = torch.tensor([[[1.0, 2.0], [2.0, 4.0]], [[1.0, 0.0], [0.0, 1.0]]])
    for function in (linalg.inv_ex, linalg.cholesky_ex):
        net: Any = prefuse.compile(Calling(function), (singular,), threads=1, cache=False)
        made, info = net(singular)
        assert info.tolist() == function(singular)[1].tolist() == [2, 0]
        torch.testing.assert_close(made[1], torch.eye(2))
    net = prefuse.compile(Calling(linalg.inv), (singular,), threads=1, cache=False)
    assert not net(singular)[0].isfinite().all()
    torch.testing.assert_close(net(singular)[1], torch.eye(2))


def test_large_matrices_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="a matrix of 65 rows, of at most 64"):
        prefuse.compile(Calling(linalg.inv), (normal(65, 65),), threads=1, cache=False)


def test_batches_of_any_number() -> None:
    net: Any = prefuse.compile(
        Calling(linalg.solve), (A, B), dims={"operands_0": {0: "N"}, "operands_1": {0: "N"}, "N": (1, 9)}, cache=False
    )
    for count in (1, 4, 9):
        a, b = normal(count, 5, 5), normal(count, 5, 2)
        torch.testing.assert_close(net(a, b), linalg.solve(a, b), rtol=2e-4, atol=2e-4)
