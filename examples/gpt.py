"""A small GPT, and the text that it learns: the sources of the running Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn

CONTEXT, WIDTH = 64, 192


def text(length: int = 1 << 20) -> bytes:
    """The first ``length`` bytes of the standard library's sources."""
    data = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        data += path.read_bytes()
        if len(data) >= length:
            break
    return data[:length]


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.place = nn.Parameter(torch.randn(CONTEXT, WIDTH) / 50)
        layer = nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, dropout=dropout, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("text", torch.frombuffer(bytearray(text()), dtype=torch.uint8), persistent=False)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def batch(self, step: int, size: int) -> torch.Tensor:
        """``size`` pieces of the text, of ``CONTEXT + 1`` bytes each.

        What a step sees and drops depends on the step alone: a resumed run sees the same.
        """
        torch.manual_seed(1_000_003 * step + 17)
        starts = torch.randint(0, len(self.text) - CONTEXT - 1, (size,))
        return torch.stack([self.text[start : start + CONTEXT + 1] for start in starts]).long()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of each next byte."""
        hidden = self.blocks(self.token(tokens[:, :-1]) + self.place, mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
