"""What the suite trains: models of several kinds, each with its batches, loss and equal cuts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from models import GPTCase, language_loss
from torch import nn


class _Logits(nn.Module):
    """A Hugging Face classifier as a function of one tensor."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs as the model takes them first; gives scores [B, classes]."""
        return self.model(inputs).logits


class _Blocks:
    """A case whose model is a row of blocks, `num_blocks` below `path`."""

    path: ClassVar[str]
    num_blocks: int

    def cuts(self, num_stages: int) -> list[str]:
        """Names of the modules before which stages begin."""
        numbers = [i * self.num_blocks // num_stages for i in range(1, num_stages)]
        return [f"{self.path}.{number}" for number in numbers]


@dataclass(frozen=True)
class BertCase(_Blocks):
    """`BertForSequenceClassification` of transformers, from a small configuration."""

    path: ClassVar[str] = "model.bert.encoder.layer"
    width: int = 192
    num_blocks: int = 4
    length: int = 128
    vocabulary: int = 4096
    microbatch_size: int = 4

    def model(self) -> nn.Module:
        """The model, with the same values in every process; dropout is off."""
        from transformers import BertConfig, BertForSequenceClassification

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            num_hidden_layers=self.num_blocks,
            num_attention_heads=self.width // 64,
            intermediate_size=4 * self.width,
            max_position_embeddings=self.length,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=4,
        )
        return _Logits(BertForSequenceClassification(config))

    def batch(self, num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [B, length] and labels [B]."""
        generator = torch.Generator().manual_seed(1)
        count = num_microbatches * self.microbatch_size
        ids = torch.randint(0, self.vocabulary, (count, self.length), generator=generator)
        return ids, torch.randint(0, 4, (count,), generator=generator)

    loss = staticmethod(F.cross_entropy)


@dataclass(frozen=True)
class LlamaCase(_Blocks):
    """`LlamaForCausalLM` of transformers, from a small configuration; 12 M parameters."""

    path: ClassVar[str] = "model.model.layers"
    width: int = 384
    num_blocks: int = 4
    num_heads: int = 8
    length: int = 128
    vocabulary: int = 4096
    microbatch_size: int = 2

    def model(self) -> nn.Module:
        """The model, with the same values in every process."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=4 * self.width,
            num_hidden_layers=self.num_blocks,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads // 2,
            max_position_embeddings=self.length,
            use_cache=False,
        )
        return _Logits(LlamaForCausalLM(config))

    def batch(self, num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [B, length] and the tokens that follow them."""
        generator = torch.Generator().manual_seed(1)
        shape = (num_microbatches * self.microbatch_size, self.length + 1)
        ids = torch.randint(0, self.vocabulary, shape, generator=generator)
        return ids[:, :-1], ids[:, 1:]

    loss = staticmethod(language_loss)


@dataclass(frozen=True)
class VitCase(_Blocks):
    """`ViTForImageClassification` of transformers, from a small configuration."""

    path: ClassVar[str] = "model.vit.layers"
    width: int = 192
    num_blocks: int = 4
    side: int = 64
    microbatch_size: int = 8

    def model(self) -> nn.Module:
        """The model, with the same values in every process; dropout is off."""
        from transformers import ViTConfig, ViTForImageClassification

        torch.manual_seed(0)
        config = ViTConfig(
            hidden_size=self.width,
            num_hidden_layers=self.num_blocks,
            num_attention_heads=self.width // 64,
            intermediate_size=4 * self.width,
            image_size=self.side,
            patch_size=8,
            num_labels=10,
        )
        return _Logits(ViTForImageClassification(config))

    def batch(self, num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images [B, 3, side, side] and labels [B]."""
        generator = torch.Generator().manual_seed(1)
        count = num_microbatches * self.microbatch_size
        images = torch.randn(count, 3, self.side, self.side, generator=generator)
        return images, torch.randint(0, 10, (count,), generator=generator)

    loss = staticmethod(F.cross_entropy)


class UNet(nn.Module):
    """Images to images; two skips, the outer one over everything in between."""

    def __init__(self, width: int):
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(4 * width, 4 * width, 3, padding=1)
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up2 = nn.ConvTranspose2d(4 * width, width, 2, stride=2)
        self.leave = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 3, S, S] to [B, 3, S, S]."""
        outer = F.gelu(self.enter(x))
        inner = F.gelu(self.down(outer))
        x = F.gelu(self.middle(F.gelu(self.bottom(inner))))
        x = torch.cat([F.gelu(self.up1(x)), inner], dim=1)
        x = torch.cat([F.gelu(self.up2(x)), outer], dim=1)
        return self.leave(x)


@dataclass(frozen=True)
class UNetCase:
    """A U-shaped net."""

    width: int = 24
    side: int = 64
    microbatch_size: int = 2

    def model(self) -> nn.Module:
        """The model, with the same values in every process."""
        torch.manual_seed(0)
        return UNet(self.width)

    def batch(self, num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Noisy images and clean ones, [B, 3, side, side] each."""
        generator = torch.Generator().manual_seed(1)
        shape = (num_microbatches * self.microbatch_size, 3, self.side, self.side)
        clean = torch.randn(shape, generator=generator)
        return clean + 0.1 * torch.randn(shape, generator=generator), clean

    def cuts(self, num_stages: int) -> list[str]:
        """Names of the modules before which stages begin."""
        return {2: ["middle"], 4: ["down", "middle", "up2"]}[num_stages]

    loss = staticmethod(F.mse_loss)


CASES: dict[str, Callable[[], Any]] = {
    "gpt": GPTCase,
    "half": lambda: GPTCase(num_blocks=4),
    "wide": lambda: GPTCase(vocabulary=2048, width=768, num_blocks=2, num_heads=12),
    "tiny": lambda: GPTCase(vocabulary=256, width=64, num_blocks=4, num_heads=2, length=32),
    "bert": BertCase,
    "llama": LlamaCase,
    "vit": VitCase,
    "unet": UNetCase,
}
