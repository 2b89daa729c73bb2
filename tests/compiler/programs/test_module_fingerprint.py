"""A fingerprint changes with everything that could change the exported graph, and is refused where it cannot know."""

import dataclasses
import functools
import math
import operator
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from prefuse.compiler.programs.memory_digest import looking
from prefuse.compiler.programs.module_fingerprint import module_fingerprint, places_of_weights
from torch import nn

SCALE = 2.0
TABLE = {"a": [1, 2]}


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class Block(nn.Module):
    def __init__(self, width: int = 3, activation: Callable[[torch.Tensor], torch.Tensor] = torch.relu) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.activation = activation
        self.power = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.inner(x)) ** self.power

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return helper(self.linear(x)) + TABLE["a"][0] + math.pi


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block()


def test_equal_modules_have_equal_fingerprints(block: Block) -> None:
    torch.manual_seed(0)
    assert module_fingerprint(block) == module_fingerprint(Block())
    assert module_fingerprint(block) is not None


def changed_weight(block: Block) -> None:
    with torch.no_grad():
        block.linear.weight[0, 0] += 1e-6


def changed_attribute(block: Block) -> None:
    block.power = 3


def changed_function(block: Block) -> None:
    block.activation = torch.sigmoid


def changed_lambda(block: Block) -> None:
    block.activation = lambda x: x + 1


def changed_partial(block: Block) -> None:
    block.activation = functools.partial(nn.functional.leaky_relu, negative_slope=0.3)


def added_buffer(block: Block) -> None:
    block.register_buffer("extra", torch.zeros(1))


def replaced_child(block: Block) -> None:
    block.linear = nn.Sequential(block.linear)  # type: ignore[assignment]  # what users do


CHANGES = [changed_weight, changed_attribute, changed_function, changed_lambda, changed_partial, added_buffer, replaced_child]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_shows(block: Block, change: Callable[[Block], None]) -> None:
    before = module_fingerprint(block)
    change(block)
    after = module_fingerprint(block)
    assert None not in (before, after)
    assert after != before


def test_a_global_that_a_helper_reads_shows(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    before = module_fingerprint(block)
    monkeypatch.setitem(TABLE, "a", [2, 2])
    between = module_fingerprint(block)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    prints = {before, between, module_fingerprint(block)}
    assert len(prints) == 3
    assert None not in prints


def test_code_of_a_method_shows(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    before = module_fingerprint(block)
    monkeypatch.setattr(Block, "inner", lambda self, x: helper(self.linear(x)) + 7)
    assert module_fingerprint(block) not in (before, None)


def test_the_training_flag_does_not_show(block: Block) -> None:
    before = module_fingerprint(block)
    assert module_fingerprint(block.eval()) == before


def reads_environment(x: torch.Tensor) -> torch.Tensor:
    return x * int(os.environ.get("FACTOR", "1"))


def rolls_dice(x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def imports_inside(x: torch.Tensor) -> torch.Tensor:
    import time

    return x * time.time()


@pytest.mark.parametrize("activation", [reads_environment, rolls_dice, imports_inside, operator.attrgetter("T"), iter([1])])
def test_what_cannot_be_known_is_refused(block: Block, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    block.activation = activation
    assert module_fingerprint(block) is None


def test_hooks_are_refused(block: Block) -> None:
    block.linear.register_forward_hook(lambda module, inputs, output: output + 1)
    assert module_fingerprint(block) is None


def test_another_process_finds_the_same(tmp_path: Path) -> None:
    source = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = {"names", "of", "several", "strings"}
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.MultiheadAttention(4, 2))
    def forward(self, x):
        return self.body(x)
"""
    (tmp_path / "network.py").write_text(source)
    program = (
        "import torch, network; from prefuse.compiler.programs.module_fingerprint import module_fingerprint;"
        "torch.manual_seed(0); print(module_fingerprint(network.Net()))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1
    assert found != {"None"}


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    width: int
    scale: float


class Configured(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.recurrent = nn.GRU(config.width, config.width)  # keeps weak references to its weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.recurrent(x)[0]
        return states * self.config.scale


def test_a_dataclass_with_slots_and_weak_references_to_weights_are_followed() -> None:
    def fingerprint(scale: float) -> str | None:
        torch.manual_seed(0)
        return module_fingerprint(Configured(Config(3, scale)))

    assert fingerprint(1.0) is not None
    assert fingerprint(1.0) == fingerprint(1.0)
    assert fingerprint(1.0) != fingerprint(2.0)


class Several(nn.Module):
    def __init__(self, *functions: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for function in self.functions:
            x = function(x)
        return x


def test_which_object_is_met_again_shows() -> None:
    def shift(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert module_fingerprint(Several(helper, shift, helper)) == module_fingerprint(Several(helper, shift, helper))
    assert module_fingerprint(Several(helper, shift, helper)) != module_fingerprint(Several(helper, shift, shift))


def test_a_function_with_the_name_of_one_of_torch_is_read() -> None:
    def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return functools.wraps(nn.functional.relu)(lambda x: x * factor)

    assert module_fingerprint(Several(scaled(1.0))) not in (None, module_fingerprint(Several(scaled(2.0))))


def test_what_a_decorator_of_torch_wraps_is_read() -> None:
    def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
        @torch.no_grad()
        def scale(x: torch.Tensor) -> torch.Tensor:
            return x * factor

        return scale

    assert module_fingerprint(Several(scaled(1.0))) not in (None, module_fingerprint(Several(scaled(2.0))))


class Shift:
    def __init__(self) -> None:
        self.value = SCALE

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.value


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = Shift()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Shift().add(self.shift.add(x))


def test_a_constructor_that_forward_calls_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Shifted()
    before = module_fingerprint(module)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert module_fingerprint(module) not in (None, before)


class Sizes(NamedTuple):
    height: int
    width: int


class Shaped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = Sizes(x.shape[0], x.shape[1])
        return x * sizes.height


def test_a_named_tuple_is_followed() -> None:
    """Its constructor calls that of tuple, which names no module. Hugging Face's models reach one where psutil is installed."""
    assert module_fingerprint(Shaped()) is not None
    assert module_fingerprint(Shaped()) == module_fingerprint(Shaped())


def test_only_what_is_digested_where_it_lies_has_a_place() -> None:
    """The digest of a transposed weight is that of a copy, in whose place something else may be at the next look."""
    module = nn.Linear(256, 256)
    module.weight = nn.Parameter(module.weight.detach().T)
    table = torch.zeros(256, 256)
    module.register_buffer("table", table)
    with looking() as places:
        module_fingerprint(module)
    assert len(places) == 2
    assert places & places_of_weights(module) == {(table.data_ptr(), table.nbytes)}
