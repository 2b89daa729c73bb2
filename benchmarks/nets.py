"""What can be measured by name: our example models, and the image models of timm and torchvision."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import click
import torch
from prefuse.examples import models
from prefuse.examples.models import MODELS, Inputs
from prefuse.examples.models.gpt2 import GPT2, Config
from prefuse.examples.models.spec import seeded
from prefuse.examples.models.weights import random_tokens
from torch import nn

_IMAGE = (3, 224, 224)  # of torchvision's models, and of timm's that do not say
LIBRARIES = ("timm", "torchvision")
GPT2_SIZES = {  # of 124, 355, 774 and 1,558 million parameters
    "gpt2": Config(),
    "gpt2-medium": Config(width=1024, layers=24, heads=16),
    "gpt2-large": Config(width=1280, layers=36, heads=20),
    "gpt2-xl": Config(width=1600, layers=48, heads=25),
}


class UnknownModelError(ValueError):
    """There is no model of a name, or its library is not installed."""


def build(name: str, small: bool = False, batch: int = 1) -> tuple[nn.Module, Inputs]:
    """The module of an example model, or of "timm/NAME" or "torchvision/NAME" with seeded random weights, and inputs for it.

    "gpt2-large@256" is GPT-2 in one of its published sizes with a text of 256 tokens. `small` is for our own models, whose batch
    is part of their recipe; `batch` texts or images are for the others.

    Raises:
        UnknownModelError: there is no such model, or its library is not installed.
    """
    library, _, model = name.partition("/")
    size, _, tokens = name.partition("@")
    if size in GPT2_SIZES and tokens.isdecimal():
        return seeded(lambda: _gpt2(GPT2_SIZES[size], int(tokens), batch))
    if not model and name in MODELS and batch == 1:
        return MODELS[name].build(small)
    if not is_known(name) or not model:
        raise UnknownModelError(f"no model {name!r} with a batch of {batch}: use {_names()}")
    try:
        create = _timm(model) if library == "timm" else _torchvision(model)
        return seeded(lambda: _with_images(create(), batch))
    except (ImportError, RuntimeError, ValueError) as error:
        raise UnknownModelError(f"{name}: {error}") from error


def is_known(name: str) -> bool:
    """Whether a name is of a model of ours, or of a library that may have it."""
    size, _, tokens = name.partition("@")
    library, _, model = name.partition("/")
    return name in MODELS or (size in GPT2_SIZES and tokens.isdecimal()) or (library in LIBRARIES and bool(model))


def model_names(_context: click.Context, _argument: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of models on a command line, each once; "all" is every one of ours."""
    if unknown := [name for name in names if name != "all" and not is_known(name)]:
        raise click.BadParameter(f"unknown model {unknown[0]!r}; use all, {_names()}")
    return tuple(dict.fromkeys(one for name in names for one in (MODELS if name == "all" else [name])))


@cache
def recipe() -> str:
    """Equal where models are made alike: what is kept of them is taken only then."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in (Path(__file__), *sorted(Path(models.__file__).parent.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _names() -> str:
    return f"{', '.join(MODELS)}, SIZE@TOKENS of {', '.join(GPT2_SIZES)}, timm/NAME or torchvision/NAME"


def _gpt2(config: Config, tokens: int, batch: int) -> tuple[nn.Module, Inputs]:
    return GPT2(config), (random_tokens(config.vocabulary, batch, tokens),)


def _with_images(module: nn.Module, batch: int) -> tuple[nn.Module, Inputs]:
    shape = getattr(module, "pretrained_cfg", {}).get("input_size", _IMAGE)
    return module, (torch.randn(batch, *shape),)


def _timm(model: str) -> Callable[[], nn.Module]:
    _without_operators()
    from timm import create_model

    return lambda: create_model(model, pretrained=False)


def _torchvision(model: str) -> Callable[[], nn.Module]:
    _without_operators()
    from torchvision.models import get_model

    return lambda: get_model(model, weights=None)


def _without_operators() -> None:
    """torchvision declares its C++ operators to torch when it is loaded, which fails where those are of another build of torch.
    The models of either library do without them."""
    sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))
