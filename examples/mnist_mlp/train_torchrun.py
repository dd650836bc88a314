"""torchrun --nproc_per_node 2 examples/mnist_mlp/train_torchrun.py [--epochs 20]

Trains the MLP with several data-parallel workers, each with the whole model on its XLA device and
its own share of every epoch: torch's DistributedSampler divides, torch_xla's MpDeviceLoader
uploads ahead, mpxla averages the gradients. Rank 0 writes the weights where --checkpoint says.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.distributed.parallel_loader as pl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import mpxla as smp
from digits_data import NUM_CLASSES, load_digits
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


@smp.step
def train_step(model, images, labels):
    """Returns the loss; afterwards gradients are the mean over the workers."""
    loss = F.cross_entropy(model(images), labels)
    model.backward(loss)
    return loss


@smp.step
def eval_step(model, images, labels):
    """Returns the loss and the scores."""
    logits = model(images)
    return F.cross_entropy(logits, labels), logits


def mean_over_workers(values: list[torch.Tensor]) -> float:
    """Returns the mean of what all workers have in their lists; all of them call it."""
    own = torch.stack(values).float().mean().item()
    return sum(smp.allgather(own, smp.DP_GROUP)) / smp.dp_size()


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="of one worker")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=256, help="features of the hidden layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, help="folder with the four MNIST IDX files")
    parser.add_argument("--checkpoint", type=Path, help="where rank 0 writes the weights")
    return parser.parse_args()


def main() -> None:
    """Trains and evaluates for some epochs."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    smp.init({"ddp": True})
    device = torch_xla.device()

    digits = load_digits(args.data_dir)
    train = TensorDataset(digits.train_images, digits.train_labels)
    test = TensorDataset(digits.test_images, digits.test_labels)
    sampler = DistributedSampler(train, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    test_sampler = DistributedSampler(test, shuffle=False, drop_last=True)
    test_loader = DataLoader(test, args.batch_size, sampler=test_sampler, drop_last=True)
    model = smp.DistributedModel(MLP(digits.train_images.shape[1], args.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9)
    optimizer = smp.DistributedOptimizer(optimizer)
    log = TrainingLog(args.epochs, train_loader, test_loader, is_silent=smp.rank() != 0)

    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        losses = []
        for images, labels in pl.MpDeviceLoader(log.batches(), device):
            optimizer.zero_grad()
            loss = train_step(model, images, labels)
            optimizer.step()
            losses.append(loss.reduce_mean())
        log.end_training(mean_over_workers(losses))

        model.eval()
        losses, hits = [], []
        with torch.no_grad():
            for images, labels in pl.MpDeviceLoader(test_loader, device):
                loss, logits = eval_step(model, images, labels)
                losses.append(loss.reduce_mean())
                hits.append((logits.concat().argmax(dim=1) == labels).float().mean())
        log.end_evaluation(mean_over_workers(losses), mean_over_workers(hits))

    log.close()
    if args.checkpoint is not None and smp.rank() == 0:
        torch.save(model.state_dict(), args.checkpoint)
    smp.shutdown()


if __name__ == "__main__":
    main()
