"""torchrun --nproc_per_node 2 -m mpxla.compat examples/smp_clients/image_classifier.py \
    --partitions 2

A classifier as SMP's users write it, for CUDA devices: it saves partial and full checkpoints, goes
on from either (--resume), compares losses over replicas, and checks its own final loss.
"""

import argparse
import os

import smdistributed.modelparallel.torch as smp
import torch
import torch.nn.functional as F

from digits_data import make_loaders
from image_classifier_plain import Net


def get_arguments():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="of all replicas together")
    parser.add_argument("--num-samples", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--model-dir", default=os.environ.get("SM_MODEL_DIR", "/tmp/smp_model"))
    parser.add_argument("--resume", choices=["partial", "full"])
    parser.add_argument("--assert-loss", type=float, default=float("inf"))
    return parser.parse_args()


@smp.step
def train_step(model, images, labels):
    """One microbatch of training."""
    output = model(images)
    loss = F.nll_loss(output, labels, reduction="mean")
    model.backward(loss)
    return output, loss


@smp.step
def test_step(model, images, labels):
    """Sum of the losses and number of hits, as Python numbers."""
    output = model(images)
    loss = F.nll_loss(output, labels, reduction="sum").item()
    hits = (output.argmax(dim=1) == labels).sum().item()
    return loss, hits


def train(model, device, train_loader, optimizer, epoch):
    """Trains for one epoch."""
    model.train()
    train_loader.sampler.set_epoch(epoch)
    for number, (images, labels) in enumerate(train_loader):
        images, labels = images.to(device, non_blocking=True), labels.to(device)
        optimizer.zero_grad()
        _, loss = train_step(model, images, labels)
        optimizer.step()
        if smp.rank() == 0 and number % 8 == 0:
            print(f"epoch {epoch} batch {number} loss {loss.reduce_mean().item():.4f}")


def test(model, device, test_loader):
    """Returns mean loss and accuracy on all test samples."""
    model.eval()
    loss, hits = 0.0, 0
    with torch.no_grad():
        for images, labels in test_loader:
            losses, counts = test_step(model, images.to(device), labels.to(device))
            loss += sum(losses)
            hits += sum(counts)
    return loss / len(test_loader.dataset), hits / len(test_loader.dataset)


def save(model, optimizer, model_dir, epoch):
    """Writes a partial checkpoint (a file for each partition) and a full one."""
    if smp.rank() == 0:
        os.makedirs(model_dir, exist_ok=True)
    smp.barrier()
    if smp.dp_rank() == 0:
        state = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
        smp.save({**state, "epoch": epoch}, f"{model_dir}/partial.pt", partial=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        smp.save({**state, "epoch": epoch}, f"{model_dir}/full.pt", partial=False)
    smp.barrier()


def load(model, optimizer, model_dir, kind):
    """Loads a checkpoint and returns the next epoch."""
    checkpoint = smp.load(f"{model_dir}/{kind}.pt", partial=kind == "partial")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["epoch"] + 1


def main():
    """Trains, saves and checks."""
    if not torch.cuda.is_available():
        raise ValueError("this script needs CUDA devices")
    args = get_arguments()
    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "ddp": True})
    torch.manual_seed(1)
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda")

    train_loader, test_loader = make_loaders(
        args.batch_size, smp.dp_size(), smp.dp_rank(), args.num_samples
    )
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(torch.optim.Adadelta(model.parameters(), lr=args.lr))
    first = load(model, optimizer, args.model_dir, args.resume) if args.resume else 0
    for epoch in range(first, args.epochs):
        train(model, device, train_loader, optimizer, epoch)
        save(model, optimizer, args.model_dir, epoch)

    loss, accuracy = test(model, device, test_loader)
    losses = smp.allgather(loss, smp.DP_GROUP)
    assert max(losses) - min(losses) < 1e-6, f"replicas differ: {losses}"
    assert loss < args.assert_loss, f"the loss {loss} did not get below {args.assert_loss}"
    if smp.rank() == 0:
        print(f"final loss {loss:.6f}, accuracy {accuracy:.4f}")
    return loss


if __name__ == "__main__":
    final_loss = main()
