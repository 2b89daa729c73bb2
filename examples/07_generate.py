"""Continue texts with a language model of transformers: prompts of different lengths, drawn tokens, a text that goes on."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import prefuse
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    """A small model with random weights: what it says means nothing, but that it says the same as transformers."""
    torch.manual_seed(0)
    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "initializer_range": 0.3}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False, **sizes)).eval()
    generator = prefuse.compile_generation(model, max_tokens=64, prefill=(16,), batch=2)

    prompts = [[5, 90, 3, 17, 44], [9, 33]]  # token numbers, as a tokenizer gives them
    made = generator.generate(prompts, 12, stop=())  # greedy, and on behind the model's own end, which else ends a text
    expected = model.generate(torch.tensor(prompts[:1]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert np.array_equal(made[0], expected[0, len(prompts[0]) :])
    print("greedy:", made[0].tolist())
    print("drawn: ", generator.generate(prompts, 12, temperature=1.2, top_k=20, top_p=0.9, seed=1)[0].tolist())

    session = generator.session()  # a text that grows: only what is new is read
    for tokens in session.stream(prompts, 5):
        print("a step: ", tokens.tolist())
    other = session.fork()  # another end of the same text
    print("likely: ", other.score([[3, 4], [5]]))
    more = session.generate([[7, 7], []], 3)
    print("after two more tokens of one prompt:", more.tolist(), "lengths", session.length.tolist())

    with TemporaryDirectory() as folder:
        generator.save(Path(folder, "model.prefuse"))
        again = prefuse.load_generator(Path(folder, "model.prefuse"))  # without torch or a compiler
        assert np.array_equal(again.generate(prompts, 12, stop=()), made)


if __name__ == "__main__":
    main()
