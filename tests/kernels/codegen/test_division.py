"""Division by multiplication is exact for all numbers of its range."""

from __future__ import annotations

import pytest
from prefuse.kernels.codegen.division import divided, remainder


class Number(int):
    """A number that stands for an expression: constants of expressions are what they hold."""

    def __rshift__(self, shift: object) -> Number:
        return Number(int(self) >> int(str(shift)))

    def __mul__(self, factor: int) -> Number:
        return Number(int(self) * factor)


@pytest.mark.parametrize(("divisor", "limit"), [(1, 9), (3, 40), (7, 100), (12, 5000), (49, 4096)])
def test_it_is_exact(divisor: int, limit: int) -> None:
    for number in range(limit):
        assert divided(Number(number), divisor, limit) == number // divisor
        if divisor & (divisor - 1):
            assert remainder(Number(number), divisor, limit) == number % divisor
