"""What a causal language model of `transformers` keeps of its tokens, as layers of a cache over tensors that are given.

Keys and values grow by a row a token; recurrent states (the windows of convolutions and the sums of state space models and linear
attention) have one size, and each token changes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from ...runtime.errors import UnsupportedModelError


@dataclass(frozen=True)
class Kept:
    """What one layer keeps of one token of one sequence: keys and values [1, heads, 1, width], or none; and by their numbers the
    recurrent states [1, ...], `windows` those of convolutions."""

    rows: tuple[Tensor, Tensor] | None
    windows: dict[int, Tensor]
    states: dict[int, Tensor]


def kept_by(model: nn.Module) -> list[Kept]:
    """What a model keeps, layer by layer.

    Raises:
        UnsupportedModelError: it keeps something else, cannot take one token, or is no causal language model.
    """
    name = type(model).__name__
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        fix = "give a causal language model of transformers, such as GPT2LMHeadModel, or an ONNX decoder"
        raise UnsupportedModelError(name, "no causal language model of transformers, which has a layer for its logits", fix)
    try:
        with torch.no_grad():
            result = model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=True)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # of the model's own code
        raise UnsupportedModelError(
            name, f"it cannot take one token: {error}", "see that the model generates in torch"
        ) from error
    cache = getattr(result, "past_key_values", None) or getattr(result, "cache_params", None)
    found = [_kept_by_layer(layer) for layer in getattr(cache, "layers", ())]
    kept = [one for one in found if one is not None]
    if not any(one.rows or one.windows or one.states for one in kept) or len(kept) < len(found):
        what = "it keeps something else than keys, values and recurrent states of its tokens"
        raise UnsupportedModelError(name, what, "give a model whose cache has transformers' layers of keys, values and states")
    return kept


def _kept_by_layer(layer: object) -> Kept | None:
    """None where it is something else."""
    if isinstance(layer, DummyLayer):
        return Kept(None, {}, {})
    keys, rows = getattr(layer, "keys", None), None
    if isinstance(keys, Tensor):
        rows = keys, layer.values  # type: ignore[attr-defined]
        if keys.ndim != 4 or getattr(layer, "indexer_keys", None) is not None:
            return None
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return None if rows is None else Kept(rows, {}, {})
    windows, states = (
        {number: state for number, state in of.items() if state is not None} for of in (layer.conv_states, layer.recurrent_states)
    )
    is_batched = all(state.shape[0] == 1 for state in (*windows.values(), *states.values()))
    return Kept(rows, windows, states) if is_batched else None


class Rows(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
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


class LastRows(Rows):
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


class Caches(Cache):  # type: ignore[misc]
    """Caches whose sequences begin at places of their own: `starts` [batch]."""

    def __init__(self, layers: list[CacheLayerMixin], starts: Tensor) -> None:
        super().__init__(layers=layers)
        self._starts = starts

    def get_query_offset(self, layer_idx: int = 0) -> Tensor:
        return self._starts


class States(LinearAttentionLayer):  # type: ignore[misc]
    """Recurrent states of one layer, which the model's code changes in place."""

    def __init__(self, windows: dict[int, Tensor], states: dict[int, Tensor]) -> None:
        super().__init__(number_of_states=1 + max((*windows, *states)))
        for number in range(self.number_of_states):
            self.has_previous_state[number] = True  # zeros before the first token
        for number, window in windows.items():
            self.conv_states[number], self.is_conv_states_initialized[number] = window, True
            self.conv_kernel_size[number] = window.shape[-1]
        for number, state in states.items():
            self.recurrent_states[number], self.is_recurrent_states_initialized[number] = state, True


class RowsAndStates(Rows, States):
    """Keys and values beside recurrent states."""

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor, windows: dict[int, Tensor], states: dict[int, Tensor]) -> None:
        Rows.__init__(self, keys, values, rows)
        States.__init__(self, windows, states)
