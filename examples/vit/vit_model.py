"""timm's vision transformer for both scripts, its fake images, and the clock of their steps.

The convolution that cuts an image into patches is written as what it is, a linear layer of the
pixels of each patch: devices are good at matrix products, and not all at convolutions.
"""

import argparse
import statistics

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn


class PatchEmbedding(nn.Module):
    """Images [N, C, H, W] to one vector for each patch [N, H/P * W/P, D], without a convolution.

    Args:
        img_size: H and W.
        patch_size: P.
        in_chans: C.
        embed_dim: D.
        **options: what else `VisionTransformer` says to its `embed_layer`.
    """

    def __init__(
        self, img_size: int, patch_size: int, in_chans: int, embed_dim: int, **options: object
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.num_patches = (img_size // patch_size) ** 2
        self.proj = nn.Linear(in_chans * patch_size**2, embed_dim)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Cuts the images and projects the patches."""
        count, channels, height, width = images.shape
        size = self.patch_size
        patches = images.reshape(
            count, channels, height // size, size, width // size, size
        ).permute(0, 2, 4, 1, 3, 5)
        return self.proj(patches.reshape(count, self.num_patches, -1))


def make_model(args: argparse.Namespace) -> VisionTransformer:
    """Builds the model from its sizes, with the random values of the seed."""
    torch.manual_seed(args.seed)
    return VisionTransformer(
        img_size=args.image_size,
        patch_size=args.patch_size,
        num_classes=args.classes,
        embed_dim=args.width,
        depth=args.layers,
        num_heads=args.heads,
        embed_layer=PatchEmbedding,
    )


def make_batch(args: argparse.Namespace, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fake images [N, 3, S, S] and labels [N] of a step; the class is their brightness."""
    generator = torch.Generator().manual_seed(1000 * args.seed + number)
    labels = torch.randint(args.classes, (args.batch_size,), generator=generator)
    noise = torch.randn(args.batch_size, 3, args.image_size, args.image_size, generator=generator)
    return noise + (labels / args.classes)[:, None, None, None], labels


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Options of both scripts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup-steps", type=int, default=3, help="left out of the mean time")
    parser.add_argument("--batch-size", type=int, default=32, help="images of all replicas")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--patch-size", type=int, default=8)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def print_step(number: int, loss: float, step_s: float) -> None:
    """One line."""
    print(f"step {number:3}: loss {loss:.4f}, {step_s:.3f} s", flush=True)


def print_mean(durations_s: list[float], args: argparse.Namespace) -> None:
    """Mean of the step times without the first ones, which compile."""
    steady = durations_s[args.warmup_steps :]
    if not steady:
        print(f"no mean: all {len(durations_s)} steps are warm-up (--warmup-steps)")
        return
    mean_s = statistics.fmean(steady)
    print(
        f"mean of {len(steady)} steps {mean_s:.3f} s, {args.batch_size / mean_s:.1f} images/s; "
        f"without the first {args.warmup_steps}, which took {sum(durations_s) - sum(steady):.1f} s"
    )
