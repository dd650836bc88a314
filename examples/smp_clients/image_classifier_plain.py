"""python examples/smp_clients/image_classifier_plain.py [--epochs 2]

The plain single-process script whose losses `image_classifier.py` reaches.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

from digits_data import make_loaders


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU()
        )
        self.classifier = nn.Sequential(nn.Linear(576, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, images):
        """Returns logarithms of probabilities [N, 10]."""
        features = self.features(images).flatten(1)
        return F.log_softmax(self.classifier(features), dim=1)


def main():
    """Trains, and returns the loss on the test samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-samples", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1.0)
    args = parser.parse_args()

    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    train_loader, test_loader = make_loaders(args.batch_size, num_samples=args.num_samples)
    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        for images, labels in train_loader:
            optimizer.zero_grad()
            F.nll_loss(model(images), labels).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = [F.nll_loss(model(x), y, reduction="sum").item() for x, y in test_loader]
    loss = sum(losses) / len(test_loader.dataset)
    print(f"final loss {loss:.6f}")
    return loss


if __name__ == "__main__":
    final_loss = main()
