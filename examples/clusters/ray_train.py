"""python examples/clusters/ray_train.py [--stages 2] [--replicas 1] [--steps 8]

The ranks of a pipeline are workers of Ray Train's TorchTrainer (pip install 'mpxla[ray]'), which
places them on the machines of a Ray cluster, or on this one. Prints the loss of every step.
"""

import argparse
import tempfile
from typing import Any

import ray
import torch
import torch.nn.functional as F
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

BATCH_SIZE = 16


def make_model() -> nn.Module:
    """A small classifier [N, 8] -> [N, 4]; equal on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [16, 8] and labels [16] of a step, for all replicas together."""
    x = torch.randn(BATCH_SIZE, 8, generator=torch.Generator().manual_seed(step))
    return x, x[:, :4].argmax(dim=1)


def train(settings: dict[str, Any]) -> list[float]:
    """What every worker runs. Ray tells it its rank as torchrun does. Returns all losses."""
    import mpxla as smp  # on the worker, whose device it claims

    smp.init({"pipeline_parallel_degree": settings["stages"], "microbatches": 4, "ddp": True})
    model = smp.DistributedModel(make_model())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    @smp.step
    def train_step(model, x, labels):
        loss = F.cross_entropy(model(x), labels)
        model.backward(loss)
        return loss

    losses = []
    for step in range(settings["steps"]):
        x, labels = (part.chunk(smp.dp_size())[smp.dp_rank()] for part in batch_of(step))
        optimizer.zero_grad()
        loss = train_step(model, x, labels).reduce_mean().item()
        optimizer.step()
        mean = sum(smp.allgather(loss, smp.DP_GROUP)) / smp.dp_size()
        losses.append(mean)
        ray.train.report({"step": step, "loss": mean})  # to Ray's dashboard and callbacks
    smp.shutdown()
    return losses


def main() -> None:
    """Starts the workers and waits for them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[2])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # on a cluster: one that all machines share
        count = options.stages * options.replicas
        trainer = TorchTrainer(
            train,
            train_loop_config={"stages": options.stages, "steps": options.steps},
            scaling_config=ScalingConfig(num_workers=count),
            run_config=RunConfig(name="mpxla", storage_path=folder),
        )
        result = trainer.fit()
    for step, loss in enumerate(result.return_value):  # that of rank 0
        print(f"step {step}: loss {loss:.6f}")


if __name__ == "__main__":
    main()
