"""torchrun --nproc_per_node 2 examples/mnist_mlp/train_smp.py [--manual] [--dp 1] [--epochs 20]

Trains a three-layer MLP on handwritten digits, split over all processes: each holds a part of the
model on its XLA device, and microbatches flow through the parts. --manual: cut as MLP says;
--dp N: N such models, each with its part of every batch.
--checkpoint-dir: save there while training, and go on from what is there.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp
from digits_data import NUM_CLASSES, load_digits, make_loaders
from training_log import TrainingLog


class MLP(nn.Module):
    """Three linear layers: images [N, pixels] to the scores of the classes [N, 10]."""

    def __init__(self, num_pixels: int, width: int) -> None:
        super().__init__()
        last = smp.pp_size() - 1
        self.fc1 = nn.Linear(num_pixels, width)
        with smp.partition(min(1, last)):
            self.fc2 = nn.Linear(width, width)
        with smp.partition(last):
            self.fc3 = nn.Linear(width, NUM_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns unnormalized scores [N, 10]."""
        hidden = F.relu(self.fc1(images))
        hidden = F.relu(self.fc2(hidden))
        return self.fc3(hidden)


@smp.step
def train_step(model, images, labels):
    """Returns the loss, having added its gradients to those of the parameters."""
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    model.backward(loss)
    return loss


@smp.step
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
    parser.add_argument("--manual", action="store_true", help="cut the model as it says itself")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--dp", type=int, default=1, help="replicas of the model")
    parser.add_argument("--checkpoint-dir", type=Path, help="save there, and resume from there")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between saves")
    return parser.parse_args()


def on_host(losses: list[torch.Tensor]) -> torch.Tensor:
    """Reads losses, which are computed on the device, in one tensor."""
    return torch.stack([loss.cpu() for loss in losses])


def main() -> None:
    """Trains and evaluates for some epochs."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    smp.init(
        {
            "pipeline_parallel_degree": int(os.environ.get("WORLD_SIZE", "1")) // args.dp,
            "ddp": args.dp > 1,
            "microbatches": args.microbatches,
            "auto_partition": not args.manual,
            "default_partition": 0,
        }
    )

    digits = load_digits(args.data_dir)
    train_loader, test_loader = make_loaders(digits, args.batch_size, args.seed)
    model = smp.DistributedModel(MLP(digits.train_images.shape[1], args.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9)
    optimizer = smp.DistributedOptimizer(optimizer)
    log = TrainingLog(args.epochs, train_loader, test_loader, is_silent=smp.rank() != 0)

    first_epoch, losses_so_far = 0, []
    if args.checkpoint_dir and (args.checkpoint_dir / "newest").exists():
        position = smp.resume_from_checkpoint(args.checkpoint_dir)
        first_epoch, losses_so_far = position["epoch"], list(position["losses"])
        train_loader.generator.set_state(position["order"])
        log.skip(first_epoch, len(losses_so_far))

    for epoch in range(first_epoch, args.epochs):
        model.train()
        losses, losses_so_far = losses_so_far, []
        order = train_loader.generator.get_state()
        for images, labels in log.batches():
            images, labels = (t.chunk(args.dp)[smp.dp_rank()] for t in (images, labels))
            optimizer.zero_grad()
            loss = train_step(model, images, labels)
            optimizer.step()
            losses.append(loss.reduce_mean())
            if args.checkpoint_dir and len(losses) % args.checkpoint_every == 0:
                replicas = smp.allgather(on_host(losses), smp.DP_GROUP)
                means = torch.stack(replicas).mean(dim=0)
                smp.save_checkpoint(
                    args.checkpoint_dir,
                    f"epoch{epoch + 1}_step{len(losses)}",
                    model=model,
                    optimizer=optimizer,
                    user_content={"epoch": epoch, "losses": means, "order": order},
                    num_kept_partial_checkpoints=2,
                    asynchronous=True,
                )
        loss = sum(smp.allgather(on_host(losses).mean().item(), smp.DP_GROUP)) / args.dp
        log.end_training(loss)

        model.eval()
        losses, hits = [], []
        with torch.no_grad():
            for images, labels in test_loader:
                loss, logits = eval_step(model, images, labels)
                losses.append(loss.reduce_mean())
                hits.append(logits.concat().cpu().argmax(dim=1) == labels)
        test_loss, accuracy = on_host(losses).mean(), torch.cat(hits).float().mean()
        log.end_evaluation(test_loss.item(), accuracy.item())

    log.close()
    log.write(model.partition_report())
    smp.shutdown()


if __name__ == "__main__":
    main()
