"""python examples/mnist_mlp/train_cpu.py [--epochs 20] [--data-dir FOLDER_WITH_IDX_FILES]

Trains a three-layer MLP on handwritten digits in plain PyTorch, on the CPU. The scripts beside it
do the same on one XLA device (train.py) and on several (train_smp.py): compare them with diff.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from digits_data import NUM_CLASSES, load_digits, make_loaders
from training_log import TrainingLog


class MLP(nn.Module):
    """Three linear layers: images [N, pixels] to the scores of the classes [N, 10]."""

    def __init__(self, num_pixels: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(num_pixels, width)
        self.fc2 = nn.Linear(width, width)
        self.fc3 = nn.Linear(width, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns unnormalized scores [N, 10]."""
        hidden = F.relu(self.fc1(images))
        hidden = F.relu(self.fc2(hidden))
        return self.fc3(hidden)


def train_step(model, images, labels):
    """Returns the loss, having added its gradients to those of the parameters."""
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    loss.backward()
    return loss


def eval_step(model, images, labels):
    """Returns the loss and the scores."""
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    return loss, logits


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=256, help="features of the hidden layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, help="folder with the four MNIST IDX files")
    return parser.parse_args()


def main() -> None:
    """Trains and evaluates for some epochs."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    device = torch.device("cpu")

    digits = load_digits(args.data_dir)
    train_loader, test_loader = make_loaders(digits, args.batch_size, args.seed)
    model = MLP(digits.train_images.shape[1], args.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9)
    log = TrainingLog(args.epochs, train_loader, test_loader)

    for _ in range(args.epochs):
        model.train()
        losses = []
        for images, labels in log.batches():
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = train_step(model, images, labels)
            optimizer.step()
            losses.append(loss.detach())
        log.end_training(torch.stack(losses).mean().item())

        model.eval()
        losses, hits = [], []
        with torch.no_grad():
            for images, labels in test_loader:
                images, labels = images.to(device), labels.to(device)
                loss, logits = eval_step(model, images, labels)
                losses.append(loss)
                hits.append(logits.argmax(dim=1) == labels)
        test_loss, accuracy = torch.stack(losses).mean(), torch.cat(hits).float().mean()
        log.end_evaluation(test_loss.item(), accuracy.item())

    log.close()


if __name__ == "__main__":
    main()
