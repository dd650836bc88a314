"""Tiny models with the traits that pipelines get wrong, each with its step function and data.

A `Subject` is all that a training script brings along. The same step function trains the plain
model and the distributed one: it only calls `model(...)` and `model.backward(loss)`. Dropout is off
unless a subject is about dropout, so that two runs can be compared.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["SUBJECTS", "Batch", "Gpt", "Subject", "subject"]

Batch = dict[str, torch.Tensor]

WIDTH = 16
NUM_TOKENS = 24
LENGTH = 8
NUM_CLASSES = 5


@dataclass(frozen=True)
class Subject:
    """A model to train, and how.

    Attributes:
        build: makes the model.
        step: body of the step function, `step(model, batch)`; returns a dict with "loss".
        batch: makes the data of one step for a number of samples; all tensors along axis 0.
        manual: module path -> pipeline rank, for the runs that place by hand on two ranks.
        learning_rate: of SGD; Adam runs with a tenth of it.
    """

    build: Callable[[], nn.Module]
    step: Callable[[Any, Batch], dict[str, Any]]
    batch: Callable[[int], Batch]
    manual: Mapping[str, int] = field(default_factory=dict)
    learning_rate: float = 0.1


def subject(name: str) -> Subject:
    """The subject of a name; models of transformers are imported when they are asked for."""
    if name in SUBJECTS:
        return SUBJECTS[name]
    from mpxla.tests.models_host import SUBJECTS as OF_HOST

    if name in OF_HOST:
        return OF_HOST[name]
    from mpxla.tests.models_huggingface import SUBJECTS as HUGGINGFACE

    return HUGGINGFACE[name]


# --- steps and data -----------------------------------------------------------------------------


def classify(model: Any, batch: Batch) -> dict[str, Any]:
    logits = model(batch["x"])
    loss = F.cross_entropy(logits, batch["y"])
    model.backward(loss)
    return {"loss": loss, "logits": logits}


def labelled(shape: tuple[int, ...], count: int) -> Batch:
    return {"x": torch.randn(count, *shape), "y": torch.randint(NUM_CLASSES, (count,))}


def predict_tokens(model: Any, batch: Batch) -> dict[str, Any]:
    logits = model(batch["tokens"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    model.backward(loss)
    return {"loss": loss, "logits": logits}


def tokens(count: int, length: int = LENGTH) -> Batch:
    drawn = torch.randint(NUM_TOKENS, (count, length + 1))
    return {"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}


# --- plain chains -------------------------------------------------------------------------------


def mlp() -> nn.Module:
    """Uneven layers."""
    return nn.Sequential(
        nn.Linear(12, 40),
        nn.Tanh(),
        nn.Linear(40, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, NUM_CLASSES),
    )


def conv_net() -> nn.Module:
    """Batch norm: buffers that every microbatch updates, and an integer one."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8, momentum=0.3),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, NUM_CLASSES),
    )


class Wave(nn.Module):
    """Computes, and has no parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, W] -> [B, W]
        return torch.sin(x) + x * torch.sigmoid(x)


def parameterless_middle() -> nn.Module:
    """Placed by hand, the middle rank has nothing to train."""
    return nn.Sequential(nn.Linear(12, WIDTH), Wave(), Wave(), nn.Linear(WIDTH, NUM_CLASSES))


# --- transformers -------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, num_heads: int, is_causal: bool, dropout: float = 0.0):
        super().__init__()
        self.num_heads = num_heads
        self.is_causal = is_causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, T, W] -> [B, T, W]
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """Language model whose head is the token embedding."""

    def __init__(self, num_blocks: int = 2, dropout: float = 0.0, max_length: int = 12):
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, WIDTH)
        self.positions = nn.Parameter(torch.randn(max_length, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block(WIDTH, 2, True, dropout) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [B, T] -> [B, T, tokens]
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Vit(nn.Module):
    """Images to classes; patches by reshaping, positions added again before every block."""

    def __init__(self, num_blocks: int = 2, patch: int = 4):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(3 * patch * patch, WIDTH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block(WIDTH, 2, False) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # [B, 3, 8, 8] -> [B, classes]
        batch, p = images.shape[0], self.patch
        patches = images.unfold(2, p, p).unfold(3, p, p).permute(0, 2, 3, 1, 4, 5)
        x = self.embed(patches.reshape(batch, -1, 3 * p * p))
        x = torch.cat([self.token.expand(batch, 1, WIDTH), x], dim=1)
        for block in self.blocks:
            x = block(x + self.positions)
        return self.head(x[:, 0])


# --- what is no chain ---------------------------------------------------------------------------


class UNet(nn.Module):
    """Two skips; the outer one passes over everything in between."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.up1 = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.up2 = nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.leave = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, 3, 8, 8] -> [B, 3, 8, 8]
        outer = F.gelu(self.enter(x))
        inner = F.gelu(self.down(outer))
        x = F.gelu(self.up1(F.gelu(self.bottom(inner))))
        x = F.gelu(self.up2(torch.cat([x, inner], dim=1)))
        return self.leave(torch.cat([x, outer], dim=1))


def denoise(model: Any, batch: Batch) -> dict[str, Any]:
    restored = model(batch["x"])
    loss = F.mse_loss(restored, batch["clean"])
    model.backward(loss)
    return {"loss": loss, "restored": restored}


def noisy_images(count: int) -> Batch:
    clean = torch.randn(count, 3, 8, 8)
    return {"x": clean + 0.1 * torch.randn(count, 3, 8, 8), "clean": clean}


def compare_views(model: Any, batch: Batch) -> dict[str, Any]:
    """Calls the model twice; one gradient comes from a scalar, one from a given tensor."""
    first, second = model(batch["x"]), model(batch["x2"])
    agreement = F.mse_loss(first, second.detach()) + F.cross_entropy(second, batch["y"])
    model.backward(agreement)
    model.backward(first, torch.full_like(first, 0.01))
    return {"loss": agreement, "pair": (first, second), "count": batch["x"].shape[0]}


def two_views(count: int) -> Batch:
    batch = labelled((12,), count)
    return {**batch, "x2": batch["x"] + 0.1 * torch.randn(count, 12)}


class Nested(nn.Module):
    """Takes and returns nested dicts, with None, bool and integer tensors in them."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(12, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleDict(
            {"class": nn.Linear(WIDTH, NUM_CLASSES), "size": nn.Linear(WIDTH, 1)}
        )

    def forward(self, inputs: dict[str, Any], scale: torch.Tensor | None = None) -> dict[str, Any]:
        hidden = torch.tanh(self.encode(inputs["x"]))
        keep = hidden.mean(dim=1) > inputs["limits"]["low"]
        hidden = torch.where(keep[:, None], hidden, 0.5 * hidden)
        hidden = torch.tanh(self.middle(hidden) + hidden)
        if scale is not None:
            hidden = hidden * scale
        return {
            "class": {"logits": self.heads["class"](hidden), "best": None},
            "size": [self.heads["size"](hidden)[:, 0], keep],
        }


def several_heads(model: Any, batch: Batch) -> dict[str, Any]:
    found = model({"x": batch["x"], "limits": {"low": batch["low"]}}, scale=None)
    logits, (size, keep) = found["class"]["logits"], found["size"]
    loss = F.cross_entropy(logits, batch["y"]) + 0.1 * (size - keep.to(size.dtype)).square().mean()
    model.backward(loss)
    best = logits.argmax(dim=1)
    return {
        "loss": loss,
        "heads": {**found, "best": best},
        "hits": (best == batch["y"]).sum().item(),
    }


def limited(count: int) -> Batch:
    return {**labelled((12,), count), "low": 0.1 * torch.randn(count)}


class Shared(nn.Module):
    """One linear layer and one scale, read in every part of the model."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(12, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.between = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.leave = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, 12] -> [B, classes]
        x = self.enter(x)
        for layer in self.between:
            x = x + layer(torch.tanh(self.shared(x) * self.scale))
        return self.leave(torch.tanh(x))


SUBJECTS: dict[str, Subject] = {
    "mlp": Subject(mlp, classify, partial(labelled, (12,)), {"2": 1, "4": 0, "6": 1}),
    "conv_net": Subject(
        conv_net, classify, partial(labelled, (3, 8, 8)), {"3": 1, "4": 1, "5": 1, "11": 1}
    ),
    "parameterless": Subject(
        parameterless_middle, classify, partial(labelled, (12,)), {"1": 1, "2": 1, "3": 2}
    ),
    "gpt": Subject(Gpt, predict_tokens, tokens, {"blocks.0": 1, "norm": 1, "head": 1}),
    "vit": Subject(Vit, classify, partial(labelled, (3, 8, 8)), {"blocks.0": 1, "head": 1}),
    "unet": Subject(UNet, denoise, noisy_images, {"bottom": 1, "up1": 1}),
    "twice": Subject(mlp, compare_views, two_views, {"4": 1, "5": 1, "6": 1}),
    "nested": Subject(Nested, several_heads, limited, {"middle": 1, "heads.size": 1}),
    "shared": Subject(Shared, classify, partial(labelled, (12,)), {"between.1": 1, "leave": 1}),
}
