"""Decoders in ONNX files that keep states of one size, beside keys and values or alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import prefuse
import pytest
import torch
from prefuse.runtime.errors import UnsupportedModelError
from torch import Tensor, nn

VOCABULARY, WIDTH, WINDOW = 61, 16, 3
PROMPTS = [[5, 60, 3, 17, 44, 8, 31, 29, 2, 50, 11], [9, 33, 7]]


class Net(nn.Module):
    """A short convolution over tokens, a decaying sum of them, and attention with positions; what they keep comes and goes."""

    def __init__(self, *, sums_anew: bool) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, WINDOW, groups=WIDTH)
        self.projection, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.sums_anew = sums_anew

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        window: Tensor,
        sums: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Tensor, ...]:
        x = self.table(input_ids) + self.positions(position_ids)
        columns = torch.cat([window, x.transpose(1, 2)], dim=2)
        x = x + torch.tanh(self.convolution(columns)).transpose(1, 2)
        count = x.shape[1]
        number = torch.arange(count)
        decay = torch.where(number[:, None] >= number, 0.8 ** (number[:, None] - number).clamp(min=0).to(x.dtype), 0.0)
        before = sums * (0.8 ** (number + 1.0))[:, None]
        if self.sums_anew:  # where there is more than one token
            before = torch.where(torch.tensor(count) > 1, torch.zeros_like(before), before)
        summed = decay @ x + before
        query, key, value = self.projection(x + torch.tanh(summed)).chunk(3, dim=-1)
        keys, values = torch.cat([keys, key[:, None]], dim=2), torch.cat([values, value[:, None]], dim=2)
        old = keys.shape[2] - count
        is_seen = (torch.arange(keys.shape[2]) <= number[:, None] + old) & (attention_mask[:, None, None] > 0)
        scores = torch.where(is_seen, query[:, None] @ keys.transpose(2, 3) / 4.0, float("-inf"))
        x = x + (scores.softmax(-1) @ values)[:, 0]
        return self.head(x), columns[:, :, -(WINDOW - 1) :], summed[:, -1:], keys, values

    def begun(self, batch: int) -> tuple[Tensor, ...]:
        """What it keeps of no tokens."""
        shapes = (batch, WIDTH, WINDOW - 1), (batch, 1, WIDTH), (batch, 1, 0, WIDTH), (batch, 1, 0, WIDTH)
        return tuple(torch.zeros(shape) for shape in shapes)

    def continued(self, prompt: list[int], n: int) -> list[int]:
        """The likeliest n tokens, one after the other."""
        kept, made, text = self.begun(1), list[int](), list(prompt)
        for place, token in enumerate(iter(lambda: text.pop(0), None)):
            with torch.no_grad():
                logits, *kept_list = self(
                    torch.tensor([[token]]), torch.ones(1, place + 1, dtype=torch.int64), torch.tensor([[place]]), *kept
                )
            kept = tuple(kept_list)
            if not text:
                made.append(int(logits[0, -1].argmax()))
                text.append(made[-1])
            if len(made) == n:
                break
        return made


def exported(net: Net, path: Path, *, has_whole_state: bool = True) -> Path:
    tokens, past = 4, 5
    states = net.begun(2)
    caches = tuple(torch.zeros(2, 1, past, WIDTH) for _ in range(2))
    mask = torch.ones(2, past + tokens, dtype=torch.int64)
    free = torch.export.Dim.DYNAMIC
    places = torch.arange(past, past + tokens).expand(2, -1).contiguous()
    torch.onnx.export(
        net,
        (torch.zeros(2, tokens, dtype=torch.int64), mask, places, *states[:2], *caches),
        str(path),
        input_names=["input_ids", "attention_mask", "position_ids", "past_conv.0", "past_ssm.0", *_names("past_key_values")],
        output_names=["logits", "present_conv.0", "present_ssm.0", *_names("present")],
        dynamic_shapes=(
            {0: free, 1: free},
            {0: free, 1: free},
            {0: free, 1: free},
            {0: free},
            {0: free},
            *[{0: free, 2: free}] * 2,
        ),
        dynamo=True,
        optimize=False,
        verbose=False,
    )
    if not has_whole_state:
        proto = onnx.load(path)
        kept = [output for output in proto.graph.output if output.name != "present_ssm.0"]
        del proto.graph.output[:]
        proto.graph.output.extend(kept)
        onnx.save(proto, path)
    return path


def _names(of: str) -> list[str]:
    return [f"{of}.1.{part}" for part in ("key", "value")]


def _net(*, sums_anew: bool = False) -> Net:
    torch.manual_seed(4)
    net = Net(sums_anew=sums_anew).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
    return net


@pytest.mark.parametrize("sums_anew", [False, True])
def test_texts_of_a_file_with_states(sums_anew: bool, tmp_path: Path) -> None:
    """Read in pieces where these go on from the states, else token by token; twice the same; after an error, saved and loaded."""
    net = _net(sums_anew=sums_anew)
    path = exported(net, tmp_path / "net.onnx")
    generator = prefuse.compile_generation(path, max_tokens=40, prefill=(4, 16), batch=2, cache=False)
    assert list(generator.programs) == ([1] if sums_anew else [1, 4, 16])
    texts = np.array([net.continued(prompt, 20) for prompt in PROMPTS])
    assert len(set(texts[0].tolist())) > 4
    for _ in range(2):
        np.testing.assert_array_equal(generator.generate(PROMPTS, 20), texts)
    generator.save(tmp_path / "net.prefuse")
    session = prefuse.load_generator(tmp_path / "net.prefuse").session()
    first = session.generate(PROMPTS, 7)

    def refuse(_: np.ndarray) -> bool:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        session.generate([[], []], 4, stream=refuse)
    np.testing.assert_array_equal(np.concatenate([first, session.generate([[], []], 13)], 1), texts)


def test_a_state_that_nothing_renews_is_named(tmp_path: Path) -> None:
    path = exported(_net(), tmp_path / "net.onnx", has_whole_state=False)
    with pytest.raises(UnsupportedModelError, match=r"input past_ssm.0: no output renews it"):
        prefuse.compile_generation(path, max_tokens=40, batch=2)


class Sums(nn.Module):
    """A decaying sum of tokens alone, of which a mask hides some."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        number = torch.arange(input_ids.shape[1])
        x = self.table(input_ids) * attention_mask[:, :, None]
        decay = torch.where(number[:, None] >= number, 0.8 ** (number[:, None] - number).clamp(min=0).to(x.dtype), 0.0)
        summed = decay @ x + sums * (0.8 ** (number + 1.0))[:, None].to(x.dtype)
        return self.head(torch.tanh(summed)), summed[:, -1:]


def exported_sums(net: Sums, path: Path) -> Path:
    free, dtype = torch.export.Dim.DYNAMIC, net.head.weight.dtype
    torch.onnx.export(
        net,
        (torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64), torch.zeros(2, 1, WIDTH, dtype=dtype)),
        str(path),
        input_names=["input_ids", "attention_mask", "past_ssm.0"],
        output_names=["logits", "present_ssm.0"],
        dynamic_shapes=({0: free, 1: free}, {0: free, 1: free}, {0: free}),
        dynamo=True,
        optimize=False,
        verbose=False,
    )
    return path


def test_pieces_of_a_file_of_few_bits_agree_as_far_as_these_go(tmp_path: Path) -> None:
    torch.manual_seed(4)
    path = exported_sums(Sums().eval().bfloat16(), tmp_path / "sums.onnx")
    generator = prefuse.compile_generation(path, max_tokens=40, prefill=(4,), batch=2, cache=False)
    assert list(generator.programs) == [1, 4]


def test_a_file_with_states_alone(tmp_path: Path) -> None:
    torch.manual_seed(4)
    net = Sums().eval()
    path = exported_sums(net, tmp_path / "sums.onnx")
    generator = prefuse.compile_generation(path, max_tokens=40, prefill=(4,), batch=2, cache=False)
    assert list(generator.programs) == [1, 4]
    for row, prompt in zip(generator.generate(PROMPTS, 12), PROMPTS, strict=True):
        text = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                logits, _sums = net(torch.tensor([text]), torch.ones(1, len(text)), torch.zeros(1, 1, WIDTH))
            text.append(int(logits[0, -1].argmax()))
        assert row.tolist() == text[len(prompt) :]
