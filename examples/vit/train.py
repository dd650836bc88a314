"""torchrun --nproc_per_node 2 examples/vit/train.py [--stages 2] [--steps 20]

Trains timm's vision transformer on fake images and prints how long steps take. --stages says over
how many devices the model is split; what is left of the processes are replicas: one process is one
device, two with --stages 2 a pipeline, two with --stages 1 replicas, four with --stages 2 both.
--bf16 keeps parameters and activations in bfloat16.
"""

import time

import torch
from torch import nn

import mpxla as smp
from vit_model import make_batch, make_model, make_parser, print_mean, print_step


@smp.step
def train_step(model, images, labels):
    """Returns the loss; afterwards its gradients are on the parameters."""
    loss = nn.functional.cross_entropy(model(images), labels)
    model.backward(loss)
    return loss


def main() -> list[float]:
    """Returns the loss of every step, as the mean over the replicas."""
    parser = make_parser(__doc__)
    parser.add_argument("--stages", type=int, default=1, help="devices of one replica")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--bf16", action="store_true", help="with float32 masters")
    args = parser.parse_args()
    smp.init(
        {
            "pipeline_parallel_degree": args.stages,
            "microbatches": args.microbatches,
            "ddp": True,
            "bf16": args.bf16,
        }
    )
    model = smp.DistributedModel(make_model(args))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    optimizer = smp.DistributedOptimizer(optimizer)
    losses, durations_s = [], []
    for number in range(args.steps):
        batch = make_batch(args, number)
        images, labels = (t.chunk(smp.dp_size())[smp.dp_rank()] for t in batch)
        started_s = time.perf_counter()
        optimizer.zero_grad()
        loss = train_step(model, images, labels)
        optimizer.step()
        # Reading the loss waits for the device, so that the clock shows the step and not its start.
        own_loss = loss.reduce_mean().item()
        durations_s.append(time.perf_counter() - started_s)
        losses.append(sum(smp.allgather(own_loss, smp.DP_GROUP)) / smp.dp_size())
        if smp.rank() == 0:
            print_step(number, losses[-1], durations_s[-1])
    if smp.rank() == 0:
        print_mean(durations_s, args)
        print(model.partition_report())
    smp.shutdown()
    return losses


if __name__ == "__main__":
    step_losses = main()
