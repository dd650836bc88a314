"""Fine-tunes a GPT-2, epoch by epoch: each job goes on where the last one ended."""

import argparse
import os
import random

import numpy as np
import smdistributed.modelparallel.torch as smp
import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from gpt_plain import ACCUMULATED, EPOCHS, make_loader


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--output_dir")
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--last_epoch", type=int, default=EPOCHS)
    return parser.parse_args()


@smp.step
def train_step(model, batch):
    loss = model(**batch)["loss"] / ACCUMULATED
    model.backward(loss)
    return loss


def rng_state():
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
    }


def save(args, model, optimizer, scheduler, epoch):
    if smp.dp_rank() == 0:
        smp.save(
            {
                "model_state_dict": model.local_state_dict(),
                "optimizer_state_dict": optimizer.local_state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": epoch,
                "args": args,
                "rng": rng_state(),
            },
            os.path.join(args.output_dir, "checkpoint.pt"),
            partial=True,
        )
    smp.barrier()


def resume(args, model, optimizer, scheduler):
    """Loads the model now, and the optimizer when its partition is known."""
    path = os.path.join(args.output_dir, "checkpoint.pt")
    if not os.path.exists(f"{path}_0"):
        return 0
    checkpoint = smp.load(path, partial=True)
    model.load_state_dict(checkpoint["model_state_dict"])
    states = [checkpoint["optimizer_state_dict"]]

    def load_optimizer(model, optimizer):
        while states:
            optimizer.load_state_dict(states.pop())

    model.register_post_partition_hook(load_optimizer)
    scheduler.load_state_dict(checkpoint["scheduler"])
    rng = checkpoint["rng"]
    random.setstate(rng["python"])
    np.random.set_state(rng["numpy"])
    torch.set_rng_state(rng["torch"].cpu())
    torch.cuda.set_rng_state_all([state.cpu() for state in rng["cuda"]])
    assert vars(checkpoint["args"])["partitions"] == args.partitions
    return checkpoint["epoch"] + 1


def main():
    args = get_args()
    smp.init({"partitions": args.partitions, "microbatches": 2, "ddp": True, "optimize": "speed"})
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda", smp.local_rank())
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
    model = smp.DistributedModel(model, backward_passes_per_step=ACCUMULATED)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=4)
    loader, losses = make_loader(smp.dp_size(), smp.dp_rank()), []
    model.train()
    for epoch in range(resume(args, model, optimizer, scheduler), args.last_epoch):
        loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(tqdm(loader, disable=smp.rank() > 0), start=1):
            batch = {key: value.to(device) for key, value in batch.items()}
            loss = train_step(model, batch).reduce_mean().detach()
            dist.all_reduce(loss, group=smp.get_dp_process_group())
            losses.append(loss.item() / dist.get_world_size(smp.get_dp_process_group()))
            if number % ACCUMULATED == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        save(args, model, optimizer, scheduler, epoch)
    return {"losses": losses, "weights": model.state_dict()}


if __name__ == "__main__":
    found = main()
