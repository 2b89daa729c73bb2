"""A causal language model of `transformers` in llama.cpp, token by token: its weights as a GGUF file in one of ggml's formats.

Needs llama-cpp-python, which is built where it is installed, and gguf. Both are imported when a model is written or run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FORMATS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}  # by ours
_TOKEN = 5

_OF_GPT2 = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_OF_LLAMA = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: Any, name: str, path: Path) -> None:
    """Write a GPT-2 or a Llama: matrices in the format that `name` of ours has in ggml, vectors and positions in float32.

    The file has no tokenizer. Blocks of Q8_0 and Q4_0 have a scale for 32 weights.
    """
    import gguf

    kind = gguf.GGMLQuantizationType[FORMATS[name]]
    config, is_gpt2 = model.config, model.config.model_type == "gpt2"
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if is_gpt2:
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    for tensor, array in _of_gpt2(model) if is_gpt2 else _of_llama(model):
        is_matrix = array.ndim == 2 and tensor != "position_embd.weight"
        one = kind if is_matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor, gguf.quants.quantize(np.ascontiguousarray(array), one), raw_dtype=one)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCppText:
    """A text of `tokens` tokens after `rewind`; `most` are those that the cache has room for."""

    def __init__(self, path: Path, tokens: int, threads: int, most: int) -> None:
        from llama_cpp import Llama

        self._net = Llama(
            str(path), n_ctx=most, n_batch=max(tokens, 1), n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self._tokens = tokens
        self.rewind()

    def rewind(self) -> None:
        """Begin the text anew."""
        self._net.reset()
        self._net.eval([_TOKEN] * self._tokens)

    def step(self) -> np.ndarray:
        """One token more; its logits."""
        from llama_cpp import llama_get_logits

        self._net.eval([_TOKEN])
        return np.ctypeslib.as_array(llama_get_logits(self._net.ctx), (self._net.n_vocab(),))

    @property
    def facts(self) -> dict[str, str]:
        return {}


def _of_gpt2(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    body = model.transformer
    yield "token_embd.weight", _array(body.wte.weight)
    yield "position_embd.weight", _array(body.wpe.weight)
    yield from _pair("output_norm", body.ln_f)
    for number, layer in enumerate(body.h):
        for ours, theirs in _OF_GPT2.items():
            yield from _pair(f"blk.{number}.{theirs}", layer.get_submodule(ours), is_turned=True)


def _of_llama(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    body, config = model.model, model.config
    yield "token_embd.weight", _array(body.embed_tokens.weight)
    yield "output.weight", _array(model.lm_head.weight)
    yield from _pair("output_norm", body.norm)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for number, layer in enumerate(body.layers):
        for ours, theirs in _OF_LLAMA.items():
            for name, array in _pair(f"blk.{number}.{theirs}", layer.get_submodule(ours)):
                yield name, _interleaved(array, heads[theirs]) if theirs in heads else array


def _interleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection whose head's halves are rotated, as llama.cpp has them, which rotates pairs."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _pair(name: str, module: Any, *, is_turned: bool = False) -> Iterator[tuple[str, np.ndarray]]:
    """Weight and bias; `is_turned`: a matrix lies as [in, out]."""
    weight = _array(module.weight)
    yield f"{name}.weight", weight.T if is_turned else weight
    if getattr(module, "bias", None) is not None:
        yield f"{name}.bias", _array(module.bias)


def _array(parameter: Any) -> np.ndarray:
    array: np.ndarray = parameter.detach().float().numpy()
    return array
