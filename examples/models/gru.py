"""Recurrent models: a GRU encoder-decoder with attention (Bahdanau et al., 2014) and a bidirectional GRU with a linear layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .spec import Inputs
from .weights import initialize, random_tokens


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of the encoder-decoder: German to English on Multi30k unless changed."""

    source_vocabulary: int = 7853
    target_vocabulary: int = 5893
    embedding: int = 256
    hidden: int = 512
    source_tokens: int = 24
    target_tokens: int = 24  # greedy decoding runs exactly this many steps, so that the program has no data-dependent loop


class Encoder(nn.Module):
    """Tokens [N, S] -> states of both directions [N, S, 2 hidden] and the decoder's first state [N, hidden]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.source_vocabulary, config.embedding)
        self.recurrent = nn.GRU(config.embedding, config.hidden, bidirectional=True, batch_first=True)
        self.project = nn.Linear(2 * config.hidden, config.hidden)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        states, last = self.recurrent(self.embedding(tokens))
        return states, torch.tanh(self.project(torch.cat([last[0], last[1]], dim=-1)))


class Decoder(nn.Module):
    """One step: the last token [N] and state [N, hidden] -> scores [N, vocabulary] of the next token, and the next state."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, embedding = config.hidden, config.embedding
        self.embedding = nn.Embedding(config.target_vocabulary, embedding)
        self.align_source = nn.Linear(2 * hidden, hidden)
        self.align_state = nn.Linear(hidden, hidden, bias=False)
        self.align = nn.Linear(hidden, 1, bias=False)
        self.cell = nn.GRUCell(embedding + 2 * hidden, hidden)
        self.output = nn.Linear(3 * hidden + embedding, config.target_vocabulary)

    def forward(self, token: Tensor, state: Tensor, states: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        energy = self.align(torch.tanh(keys + self.align_state(state)[:, None]))  # [N, S, 1]
        context = (energy.softmax(dim=1) * states).sum(dim=1)
        word = self.embedding(token)
        state = self.cell(torch.cat([word, context], dim=-1), state)
        return self.output(torch.cat([state, context, word], dim=-1)), state


class Seq2Seq(nn.Module):
    """Source tokens [N, S] -> scores [N, T, vocabulary] and tokens [N, T] of the greedy translation."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.steps = config.target_tokens
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        initialize(self, gain=1.0)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        states, state = self.encoder(tokens)
        keys = self.decoder.align_source(states)
        token = torch.ones_like(tokens[:, 0])  # the start-of-sentence token
        scores, words = [], []
        for _ in range(self.steps):
            step_scores, state = self.decoder(token, state, states, keys)
            token = step_scores.argmax(dim=-1)
            scores.append(step_scores)
            words.append(token)
        return torch.stack(scores, dim=1), torch.stack(words, dim=1)


class BidirectionalGRU(nn.Module):
    """[T, N, inputs] -> [T, N, outputs]: both directions, then a linear layer."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.recurrent = nn.GRU(inputs, hidden, bidirectional=True)
        self.project = nn.Linear(2 * hidden, outputs)
        initialize(self, gain=1.0)

    def forward(self, sequence: Tensor) -> Tensor:
        projected: Tensor = self.project(self.recurrent(sequence)[0])
        return projected


def _seq2seq(config: Config) -> tuple[nn.Module, Inputs]:
    return Seq2Seq(config), (random_tokens(config.source_vocabulary, 1, config.source_tokens),)


def gru_seq2seq() -> tuple[nn.Module, Inputs]:
    """20.5 million parameters, one sentence of 24 tokens."""
    return _seq2seq(Config())


def gru_seq2seq_small() -> tuple[nn.Module, Inputs]:
    """Three steps of a hidden state of 16."""
    return _seq2seq(Config(64, 48, embedding=8, hidden=16, source_tokens=4, target_tokens=3))


def bigru_linear() -> tuple[nn.Module, Inputs]:
    """256 -> 512 in both directions, 16 steps, batch 32."""
    return BidirectionalGRU(256, 512, 512), (torch.randn(16, 32, 256),)


def bigru_linear_small() -> tuple[nn.Module, Inputs]:
    """Four steps of a hidden state of 16, batch 2."""
    return BidirectionalGRU(8, 16, 8), (torch.randn(4, 2, 8),)
