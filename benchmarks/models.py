"""Models and batches of the benchmarks, built from a seed, so that all peers train the same."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Pre-norm transformer block: [B, T, D] to [B, T, D]."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and MLP, each with a residual."""
        batch, length, width = x.shape
        heads = self.qkv(self.ln1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """Decoder with untied head: token ids [B, T] to scores [B, T, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, num_blocks: int, num_heads: int, length: int):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores of the next token at every position."""
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def language_loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of scores [B, T, V] against ids [B, T]."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class GPTCase:
    """A GPT and its batches.

    The default is the model of 17.4 M parameters that earlier figures of the project use.
    """

    vocabulary: int = 4096
    width: int = 384
    num_blocks: int = 8
    num_heads: int = 6
    length: int = 128
    microbatch_size: int = 2

    def model(self) -> GPT:
        """The model, with the same values in every process."""
        torch.manual_seed(0)
        return GPT(self.vocabulary, self.width, self.num_blocks, self.num_heads, self.length)

    def batch(self, num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and targets, [num_microbatches * microbatch_size, length] each."""
        generator = torch.Generator().manual_seed(1)
        shape = (2, num_microbatches * self.microbatch_size, self.length)
        ids, targets = torch.randint(0, self.vocabulary, shape, generator=generator)
        return ids, targets

    def cuts(self, num_stages: int) -> list[str]:
        """Names of the modules before which stages begin, with equal numbers of blocks."""
        return [f"blocks.{i * self.num_blocks // num_stages}" for i in range(1, num_stages)]

    loss = staticmethod(language_loss)
