"""A decoder-only transformer over bytes: RMS normalisation, rotary positions, an embedding that is the head, too."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

BYTES = 256
STD = 0.02  # of the first weights, as in GPT-2


class Size(NamedTuple):
    """Layers, their width, heads of each, and the bytes that the net sees."""

    layers: int
    width: int
    heads: int
    context: int


SIZES = {"gpt-tiny": Size(2, 128, 4, 128), "gpt-30m": Size(10, 512, 8, 512), "gpt-124m": Size(10, 1024, 16, 1024)}
"""The nets by name; an embedding of bytes is small, so that the blocks have next to all of the parameters."""


class Gpt(nn.Module):
    """Scores [texts, length, 256] of the next byte, for bytes [texts, length].

    >>> [sum(each.numel() for each in Gpt(*size).parameters()) for size in SIZES.values()]
    [426624, 31599104, 126112768]
    """

    def __init__(self, layers: int, width: int, heads: int, context: int, tied: bool = True) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(BYTES, width)  # untied it keeps its size of 1, so that the blocks add to it
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), None if tied else nn.Linear(width, BYTES, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1 and (tied or name != "embedding.weight"):
                # The stream is the sum of twice as many outputs as there are layers.
                nn.init.normal_(parameter, std=STD / ((2 * layers) ** 0.5 if name.endswith("out.weight") else 1))

    def forward(self, texts: Tensor) -> Tensor:
        """Return the scores."""
        stream = self.embedding(texts)
        turns = _rotations(texts.shape[1], stream.shape[2] // self.blocks[0].heads, texts.device)
        for block in self.blocks:
            stream = block(stream, turns)
        return linear(self.norm(stream), self.embedding.weight if self.head is None else self.head.weight)


def _rotations(length: int, width: int, device: torch.device) -> Tensor:
    """Return the cosines and sines of rotary positions, [2, length, half of a head's width]."""
    frequencies = 10_000.0 ** -(torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()])


def _rotated(heads: Tensor, turns: Tensor) -> Tensor:
    """Turn pairs of a head's features by angles that grow with the position (Su et al., 2021)."""
    (cosine, sine), (first, second) = turns, heads.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1).to(heads.dtype)


class _Block(nn.Module):
    """Attention and an MLP of four times the width, each after a normalisation and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, stream: Tensor, turns: Tensor) -> Tensor:
        split = self.query_key_value(self.attention_norm(stream)).unflatten(2, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [texts, heads, length, width of a head]
        query, key = _rotated(query, turns), _rotated(key, turns)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.attention_out(attended.transpose(1, 2).flatten(2))
        added: Tensor = self.mlp_out(gelu(self.mlp_in(self.mlp_norm(stream))))
        return stream + added
