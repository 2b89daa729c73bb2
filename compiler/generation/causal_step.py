"""A causal language model of `transformers` as a module that takes some tokens a call and keeps what attention needs of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ...runtime.errors import OptionError, UnsupportedModelError
from .check import relative_error

ROWS_STEP = 64  # rows of a cache are a multiple: attention looks at that many keys at a time

_MASKED = ("eager", "sdpa")  # attention implementations whose masks are made here: bool for sdpa, else what is added


class CausalStep(nn.Module):
    """Tokens [batch, T], of which counts [batch] are real -> logits [batch, vocabulary] of what follows the last real one.

    Keys and values of every layer, [batch, heads, rows, width], and how many tokens there are in them, `length` [batch], are
    buffers. Each sequence has places of its own: its tokens are written from `length` on. Tokens beyond its count are written
    to the last row, which nothing else uses, and move nothing; a sequence with a count of 0 stays as it is, and its logits mean
    nothing.

    Where `is_left_padded`, the model is given copies of the caches whose last row is that of the last token, and a mask of what
    is before the first: for models that place keys by counting from their end, not by masks and positions.
    """

    length: Tensor

    def __init__(self, model: nn.Module, batch: int, max_tokens: int, *, is_left_padded: bool = False) -> None:
        """`max_tokens`: that a sequence may have in all.

        Raises:
            UnsupportedModelError: the model keeps something else than keys and values, or has no linear layer for its logits.
        """
        super().__init__()
        self.model = model
        self.max_tokens, self.is_left_padded = max_tokens, is_left_padded
        self.rows = (max_tokens + ROWS_STEP) // ROWS_STEP * ROWS_STEP  # one more than tokens, at least
        self.register_buffer("length", torch.zeros(batch, dtype=torch.int64))
        self.shapes = _layer_shapes(model)
        for number, (keys, values) in enumerate(self.shapes):
            for name, like in (("keys", keys), ("values", values)):
                shape = (batch, like.shape[1], self.rows, like.shape[3])
                self.register_buffer(f"{name}{number}", torch.zeros(shape, dtype=like.dtype))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        number = torch.arange(tokens.shape[1])
        places = self.length[:, None] + number
        is_real = number < counts[:, None]
        rows = torch.where(is_real, places, self.rows - 1)
        kept = [(self.get_buffer(f"keys{layer}"), self.get_buffer(f"values{layer}")) for layer in range(len(self.shapes))]
        positions, starts = places.clamp(max=self.max_tokens - 1), self.length
        mask, layers = None, [_Rows(keys, values, rows) for keys, values in kept]
        if getattr(self.model.config, "alibi", False):  # a bias by the places of keys, for which a mask counts them
            mask = torch.ones(len(tokens), self.rows, dtype=torch.int64)
        if self.is_left_padded:
            before = self.max_tokens - tokens.shape[1]
            seen = torch.arange(self.max_tokens) - before + self.length[:, None]
            mask, starts = (seen >= 0).to(torch.int64), torch.full_like(self.length, before)
            layers = [_LastRows(keys, values, rows, seen % self.rows) for keys, values in kept]
        last = (counts - 1).clamp(min=0)
        with _masks_by_position(), _last_row_alone(self.model, last if tokens.shape[1] > 1 else None):
            result = self.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=_Caches(layers, starts),
                use_cache=True,
            )
        self.length.copy_(self.length + counts)
        logits: Tensor = result.logits
        return logits.reshape(len(tokens), -1).float()


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
            if count:
                step(prompt, torch.full((rows,), count))
            found = step(tokens[count:].expand(rows, 1), torch.ones(rows, dtype=torch.int64))
            expected = step.model(input_ids=tokens[None]).logits[:, -1].float()
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # of the model's own code
        raise UnsupportedModelError(name, f"it cannot go on from a cache of fixed length: {error}", fix) from error
    finally:
        for buffer in step.buffers(recurse=False):
            buffer.zero_()
    tolerance = 1e-3 if next(step.model.parameters()).dtype == torch.float32 else 0.1
    distance = relative_error(found.numpy(), expected.numpy())
    if isnan(distance):
        raise UnsupportedModelError(name, "there is NaN in its logits", "see that its weights are finite")
    if distance > tolerance:
        raise UnsupportedModelError(name, "from a cache of fixed length it computes something else than without one", fix)


def _check_last_position(step: CausalStep) -> None:
    last = step.max_tokens - 1
    try:
        with torch.no_grad():
            step.model(input_ids=torch.zeros(1, 1, dtype=torch.int64), position_ids=torch.full((1, 1), last), use_cache=False)
    except IndexError:  # a table of learned positions; what else goes wrong, a step tells
        most = getattr(step.model.config, "max_position_embeddings", None)
        fix = "give fewer" if most is None else f"give at most {most}"
        raise OptionError("max_tokens", f"{step.max_tokens} given, and the model has no position {last}", fix) from None
    except (RuntimeError, TypeError, ValueError):
        return


class _Rows(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """Keys and values of one layer; new ones are written to `rows` [batch, T]."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self._rows = rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("its memory is given")

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        for cache, new in ((self.keys, key_states), (self.values, value_states)):
            cache.scatter_(2, self._rows[:, None, :, None].expand(new.shape), new)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class _LastRows(_Rows):
    """The same, of which attention gets the rows `seen` [batch, keys] alone: the last of them those of the new tokens."""

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor, seen: Tensor) -> None:
        super().__init__(keys, values, rows)
        self._seen = seen

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        super().update(key_states, value_states)
        index = self._seen[:, None, :, None]
        keys, values = (cache.gather(2, index.expand(*cache.shape[:2], -1, cache.shape[3])) for cache in (self.keys, self.values))
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._seen.shape[1], 0

    def get_seq_length(self) -> int:
        return self._seen.shape[1] - self._rows.shape[1]

    def get_max_length(self) -> int:
        return self._seen.shape[1]


class _Caches(Cache):  # type: ignore[misc]
    """Caches whose sequences begin at places of their own: `starts` [batch]."""

    def __init__(self, layers: list[CacheLayerMixin], starts: Tensor) -> None:
        super().__init__(layers=layers)
        self._starts = starts

    def get_query_offset(self, layer_idx: int = 0) -> Tensor:
        return self._starts


@contextmanager
def _masks_by_position() -> Iterator[None]:
    """Masks for queries at places of their own in each sequence, in place of those for one place of all."""
    known = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in _MASKED}
    try:
        ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = _seen_keys
        ALL_MASK_ATTENTION_FUNCTIONS["eager"] = _added_mask
        yield
    finally:
        for name, function in known.items():
            ALL_MASK_ATTENTION_FUNCTIONS[name] = function


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


def _layer_shapes(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Keys and values that the model keeps of one token, layer by layer."""
    name = type(model).__name__
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        fix = "give a causal language model of transformers, such as GPT2LMHeadModel, or an ONNX decoder"
        raise UnsupportedModelError(name, "no causal language model of transformers, which has a layer for its logits", fix)
    with torch.no_grad():
        kept = getattr(model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=True), "past_key_values", None)
    layers = getattr(kept, "layers", ())
    found = [(layer.keys, layer.values) for layer in layers if getattr(layer, "keys", None) is not None]
    if not found or len(found) != len(layers) or any(keys.ndim != 4 for keys, _ in found):
        raise UnsupportedModelError(name, "it keeps something else than keys and values of its tokens", "only attention is taken")
    return found
