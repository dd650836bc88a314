"""python examples/vit/train_plain.py [--steps 20]

Trains timm's vision transformer on fake images in plain PyTorch, on the CPU. train.py beside it
does the same on several devices.
"""

import time

import torch
from torch import nn

from vit_model import make_batch, make_model, make_parser, print_mean, print_step


def train_step(model, images, labels):
    """Returns the loss; its gradients are on the parameters."""
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    return loss


def main() -> list[float]:
    """Returns the loss of every step."""
    args = make_parser(__doc__).parse_args()
    model = make_model(args)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    losses, durations_s = [], []
    for number in range(args.steps):
        images, labels = make_batch(args, number)
        started_s = time.perf_counter()
        optimizer.zero_grad()
        losses.append(train_step(model, images, labels).item())
        optimizer.step()
        durations_s.append(time.perf_counter() - started_s)
        print_step(number, losses[-1], durations_s[-1])
    print_mean(durations_s, args)
    return losses


if __name__ == "__main__":
    step_losses = main()
