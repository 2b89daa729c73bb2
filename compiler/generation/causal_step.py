"""A causal language model of `transformers` as a module that takes some tokens a call and keeps what it needs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from math import isnan
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DummyLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ...runtime.errors import OptionError, UnsupportedModelError
from ...runtime.generation.session import RECURRENT
from .caches import Caches, Kept, LastRows, Rows, RowsAndStates, States, kept_by
from .check import relative_error

ROWS_STEP = 64  # rows of a cache are a multiple: attention leaves out keys in steps that divide it


class CausalStep(nn.Module):
    """Tokens [batch, T], of which counts [batch] are real -> logits [batch, vocabulary] of what follows the last real one.

    Keys and values of every layer, [batch, heads, rows, width], and how many tokens there are in them, `length` [batch], are
    buffers. Each sequence has places of its own: its tokens are written from `length` on. Tokens beyond its count are written
    to the last row, which nothing else uses, and move nothing; a sequence with a count of 0 stays as it is, and its logits mean
    nothing. Recurrent states are buffers, too, zeros for a sequence without tokens, whatever is in the memory. A model with such
    (`is_recurrent`) takes as many tokens of each sequence in a call, or none: those beyond a count would be in the states.

    Where `is_left_padded`, the model is given copies of the caches whose last row is that of the last token, and a mask of what
    is before the first: for models that place keys by counting from their end, not by masks and positions.
    """

    length: Tensor

    def __init__(self, model: nn.Module, batch: int, max_tokens: int, *, is_left_padded: bool = False) -> None:
        """`max_tokens`: that a sequence may have in all.

        Raises:
            UnsupportedModelError: the model keeps something else than keys, values and states, or has no layer for its logits.
        """
        super().__init__()
        self.model = model
        self.max_tokens, self.is_left_padded = max_tokens, is_left_padded
        self.rows = (max_tokens + ROWS_STEP) // ROWS_STEP * ROWS_STEP  # one more than tokens, at least
        self.register_buffer("length", torch.zeros(batch, dtype=torch.int64))
        self.kept = kept_by(model)
        self.is_recurrent = any(one.windows or one.states for one in self.kept)
        for layer, kept in enumerate(self.kept):
            for name, like in zip(("keys", "values"), kept.rows or (), strict=False):
                shape = (batch, like.shape[1], self.rows, like.shape[3])
                self.register_buffer(f"{name}{layer}", torch.zeros(shape, dtype=like.dtype))
            for name, like in _states_of(kept, layer):
                self.register_buffer(name, torch.zeros((batch, *like.shape[1:]), dtype=like.dtype))
        parameters = signature(model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in parameters else "cache_params"
        self._has_positions = "position_ids" in parameters

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        number = torch.arange(tokens.shape[1])
        places = self.length[:, None] + number
        is_real = number < counts[:, None]
        rows = torch.where(is_real, places, self.rows - 1)
        starts, mask, seen = self.length, None, None
        if getattr(self.model.config, "alibi", False):  # a bias by the places of keys, for which a mask counts them
            mask = torch.ones(len(tokens), self.rows, dtype=torch.int64)
        if self.is_left_padded:
            before = self.max_tokens - tokens.shape[1]
            seen = torch.arange(self.max_tokens) - before + self.length[:, None]
            mask, starts = (seen >= 0).to(torch.int64), torch.full_like(self.length, before)
        positions = {"position_ids": places.clamp(max=self.max_tokens - 1)} if self._has_positions else {}
        states = self._states()
        caches = Caches([self._layer(layer, rows, seen, states) for layer in range(len(self.kept))], starts)
        last = (counts - 1).clamp(min=0)
        with _masks_by_position(), _last_row_alone(self.model, last if tokens.shape[1] > 1 else None):
            result = self.model(input_ids=tokens, attention_mask=mask, use_cache=True, **positions, **{self._cache_name: caches})
        for name, state in states.items():
            kept = self.get_buffer(name)
            kept.copy_(torch.where(_like(counts > 0, kept), state, kept))
        self.length.copy_(self.length + counts)
        logits: Tensor = result.logits
        return logits.reshape(len(tokens), -1).float()

    def _states(self) -> dict[str, Tensor]:
        """Copies of all recurrent states by the names of their buffers, for the model's code to change."""
        names = [name for layer, kept in enumerate(self.kept) for name, _ in _states_of(kept, layer)]
        kept = {name: self.get_buffer(name) for name in names}
        zero = torch.zeros(())
        return {name: torch.where(_like(self.length > 0, state), state, zero.to(state.dtype)) for name, state in kept.items()}

    def _layer(self, layer: int, rows: Tensor, seen: Tensor | None, states: dict[str, Tensor]) -> object:
        kept = self.kept[layer]
        of_kinds = [
            {number: states[_state_name(kind, layer, number)] for number in like}
            for kind, like in (("window", kept.windows), ("state", kept.states))
        ]
        if kept.rows is None:
            return States(*of_kinds) if any(of_kinds) else DummyLayer()
        memory = self.get_buffer(f"keys{layer}"), self.get_buffer(f"values{layer}")
        if any(of_kinds):
            return RowsAndStates(*memory, rows, *of_kinds)
        return Rows(*memory, rows) if seen is None else LastRows(*memory, rows, seen % self.rows)


def _states_of(kept: Kept, layer: int) -> list[tuple[str, Tensor]]:
    """The buffers of a layer's recurrent states, and what they are like."""
    kinds = (("window", kept.windows), ("state", kept.states))
    return [(_state_name(kind, layer, number), like) for kind, of in kinds for number, like in of.items()]


def _state_name(kind: str, layer: int, number: int) -> str:
    return f"{RECURRENT}{kind}{layer}_{number}"


def _like(of_sequences: Tensor, state: Tensor) -> Tensor:
    """[batch] with as many dimensions as a state."""
    return of_sequences.reshape(-1, *[1] * (state.ndim - 1))


def fitting_step(model: nn.Module, batch: int, max_tokens: int) -> CausalStep:
    """A step that gives the model's logits: of caches in place, or, which is slower, of copies that end with the last token.

    Raises:
        UnsupportedModelError, OptionError: as of `check_step`, for the first of these.
    """
    step = CausalStep(model, batch, max_tokens).eval()
    try:
        check_step(step)
        return step
    except UnsupportedModelError as error:
        if step.is_recurrent:
            raise
        other = CausalStep(model, batch, max_tokens, is_left_padded=True).eval()
        try:
            check_step(other)
        except UnsupportedModelError:
            raise error from None
        return other


def check_step(step: CausalStep) -> None:
    """See that a step gives the logits of its model, on a prompt in one piece and a token after it; its caches are empty then.

    Raises:
        UnsupportedModelError: it does not: the model wants to know something else of its caches than keys and values.
        OptionError: the model's table of positions ends before the last token.
    """
    _check_last_position(step)
    count, rows = min(11, step.max_tokens - 1), len(step.length)
    head = step.model.get_input_embeddings()  # type: ignore[operator]
    tokens = torch.arange(7, 7 + 5 * (count + 1), 5) % head.num_embeddings
    prompt = torch.zeros(rows, count + 4, dtype=torch.int64)
    prompt[:, :count] = tokens[:count]
    name, fix = type(step.model).__name__, "give a model whose attention goes by masks and positions, as most of transformers"
    try:
        with torch.no_grad():
            if count and not step.is_recurrent:
                step(prompt, torch.full((rows,), count))
            for number in range(count if step.is_recurrent else 0):
                for counts in (torch.zeros(rows), torch.ones(rows)):  # the first of which moves nothing
                    step(prompt[:, number : number + 1], counts.to(torch.int64))
            found = step(tokens[count:].expand(rows, 1), torch.ones(rows, dtype=torch.int64))
            expected = step.model(input_ids=tokens[None]).logits[:, -1].float()
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # of the model's own code
        raise UnsupportedModelError(name, f"it cannot go on from a cache of fixed length: {error}", fix) from error
    finally:
        for buffer in step.buffers(recurse=False):
            buffer.zero_()
    distance = relative_error(found.numpy(), expected.numpy())
    if isnan(distance):
        raise UnsupportedModelError(name, "there is NaN in its logits", "see that its weights are finite")
    if distance > tolerance_of(step.model):
        raise UnsupportedModelError(name, "from a cache of fixed length it computes something else than without one", fix)


def tolerance_of(model: nn.Module) -> float:
    """By how much of their norm logits may differ from the model's own."""
    return 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1


def _check_last_position(step: CausalStep) -> None:
    last, config = step.max_tokens - 1, step.model.config
    for end in _constant_positions(config):
        if step.max_tokens > end:
            what = f"{step.max_tokens} given, and the model turns all positions otherwise where a text has more than {end} tokens"
            raise OptionError("max_tokens", what, f"give at most {end}")
    border = int(getattr(config, "floor_scale", 0)) if getattr(config, "attn_temperature_tuning", False) else 0
    if 0 < border <= step.max_tokens:
        what = f"{step.max_tokens} given, and the model counts places from {border - 1} on by its cache"
        raise OptionError("max_tokens", what, f"give fewer than {border}")
    try:
        with torch.no_grad():
            step.model(input_ids=torch.zeros(1, 1, dtype=torch.int64), position_ids=torch.full((1, 1), last), use_cache=False)
    except IndexError:  # a table of learned positions; what else goes wrong, a step tells
        most = getattr(step.model.config, "max_position_embeddings", None)
        fix = "give fewer" if most is None else f"give at most {most}"
        raise OptionError("max_tokens", f"{step.max_tokens} given, and the model has no position {last}", fix) from None
    except (RuntimeError, TypeError, ValueError):
        return


def _constant_positions(config: object) -> list[int]:
    """Numbers of tokens up to which rotary positions are turned by constant angles, where a longer text turns all otherwise."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    forms = [rope, *(one for one in rope.values() if isinstance(one, dict))]  # of all layers, or by their types
    table = int(getattr(config, "max_position_embeddings", 0))
    found = []
    for form in forms:
        kind = form.get("rope_type", form.get("type"))
        if kind == "longrope":
            found.append(int(form.get("original_max_position_embeddings") or table))
        if kind == "dynamic":
            found.append(table)
    return found


@contextmanager
def _masks_by_position() -> Iterator[None]:
    """Masks for queries at places of their own in each sequence, in place of those for one place of all."""
    with _masks.lock:
        if not _masks.users:
            _masks.theirs = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in _OURS}
            for name, ours in _OURS.items():
                ALL_MASK_ATTENTION_FUNCTIONS[name] = partial(_mask, name, ours)
        _masks.users += 1
    try:
        yield
    finally:
        with _masks.lock:
            _masks.users -= 1
            if not _masks.users:
                for name, function in _masks.theirs.items():
                    ALL_MASK_ATTENTION_FUNCTIONS[name] = function


class _Masks:
    """The functions of transformers for whose users, of all threads, ours stand: those others call with one place for all."""

    def __init__(self) -> None:
        self.lock, self.users = Lock(), 0
        self.theirs: dict[str, Callable[..., Any]] = {}


_masks = _Masks()


def _mask(name: str, ours: Callable[..., Tensor], *positional: object, **arguments: Any) -> Any:
    """A mask of a step, or of a model that another thread calls meanwhile."""
    offset = arguments.get("q_offset")
    is_ours = isinstance(offset, Tensor) and offset.ndim == 1 and not positional
    return ours(**arguments) if is_ours else _masks.theirs[name](*positional, **arguments)


def _seen_keys(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Tensor,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    **_: object,
) -> Tensor:
    """Which keys a query sees: [batch, 1, queries, keys], or without the batch. `attention_mask` [batch, keys]: which exist."""
    queries = (torch.arange(q_length) + q_offset[:, None])[:, None, :, None]
    keys = torch.arange(kv_length)[None, None, None, :]
    sequences = torch.arange(len(q_offset))[:, None, None, None]
    mask = mask_function(sequences, torch.zeros_like(sequences[:1]), queries, keys)
    if attention_mask is not None:
        mask = mask & attention_mask[:, None, None, :kv_length].to(torch.bool)
    return mask.expand(len(q_offset), -1, q_length, kv_length)


def _added_mask(*, dtype: torch.dtype, **arguments: Any) -> Tensor:
    """The same as what is added to the scores."""
    return torch.where(_seen_keys(**arguments), 0.0, torch.finfo(dtype).min).to(dtype)


_OURS: dict[str, Callable[..., Tensor]] = {"sdpa": _seen_keys, "eager": _added_mask}  # by attention implementation


@contextmanager
def _last_row_alone(model: nn.Module, last: Tensor | None) -> Iterator[None]:
    """Logits of one row a sequence, number `last` [batch], are made, in place of those of all rows; None: as they come."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if last is None:
        yield
        return

    def take(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *rest = inputs
        index = last[:, None, None].expand(-1, 1, hidden.shape[-1])
        return hidden.gather(1, index), *rest

    hook = head.register_forward_pre_hook(take)
    try:
        yield
    finally:
        hook.remove()
