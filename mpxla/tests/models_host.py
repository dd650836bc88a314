"""Models whose stages have operators that the XLA device has no code for."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mpxla.tests.models import Batch, Subject

__all__ = ["SUBJECTS"]

NUM_STEPS, NUM_SYMBOLS = 4, 6


class Warp(nn.Module):
    """`grid_sample`, with derivatives of image and grid."""

    def forward(self, x):
        grid = torch.tanh(torch.stack([x, x.roll(1, 1)], -1)).view(-1, 4, 4, 2)
        return F.grid_sample(x.view(-1, 1, 4, 4), grid, align_corners=False).flatten(1)


class Whiten(nn.Module):
    """`linalg.cholesky` and `cholesky_solve`."""

    def forward(self, x):
        matrix = x.view(-1, 4, 4)
        factor = torch.linalg.cholesky(matrix @ matrix.mT + 2 * torch.eye(4, device=x.device))
        return torch.cholesky_solve(matrix, factor).flatten(1)


class Spectrum(nn.Module):
    """A Fourier transform; complex numbers stand between two host operators."""

    def forward(self, x):
        spectrum = torch.fft.rfft(x) * torch.tensor(0.5 + 0.5j)
        return torch.fft.irfft(spectrum, n=16) + spectrum.abs().sum(1, keepdim=True) / 16


class Centre(nn.Module):
    def forward(self, x):
        return x - x.median(1, keepdim=True).values + x.kthvalue(2, 1, keepdim=True).values


class Distances(nn.Module):
    """`cdist` to places that are learned."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(NUM_SYMBOLS, 4))

    def forward(self, x):
        return -torch.cdist(x.view(-1, NUM_STEPS, 4), self.places)


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 16),
        Warp(),
        nn.Linear(16, 16),
        Whiten(),
        nn.Linear(16, 16),
        Spectrum(),
        nn.Linear(16, 16),
        Centre(),
        nn.Linear(16, 16),
        Distances(),
    )


def recognize(model: Any, batch: Batch) -> dict[str, Any]:
    logits = model(batch["x"])
    loss = F.ctc_loss(
        logits.log_softmax(-1).transpose(0, 1),
        batch["symbols"],
        batch["lengths"],
        batch["symbol_lengths"],
        zero_infinity=True,
    )
    model.backward(loss)
    return {"loss": loss, "logits": logits}


def sequences(count: int) -> Batch:
    return {
        "x": torch.randn(count, 12),
        "symbols": torch.randint(1, NUM_SYMBOLS, (count, 3)),
        "lengths": torch.full((count,), NUM_STEPS),
        "symbol_lengths": torch.randint(1, 3, (count,)),
    }


SUBJECTS = {
    "host": Subject(build, recognize, sequences, {"4": 1, "6": 1, "8": 1, "9": 1}, 0.02),
}
