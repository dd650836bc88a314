"""Behaviours 3 - 6, 18, 23: where optimizers and schedulers are built; seeds by rank."""

import argparse

import smdistributed.modelparallel.torch as smp
import torch
import torch.nn.functional as F
from client_lib import assert_close, batch, listening, make_net, plain_losses

parser = argparse.ArgumentParser()
parser.add_argument("--built", choices=["before", "after"])
parser.add_argument("--scheduler", choices=["inner", "step", "linear"])
args = parser.parse_args()


def set_seed(seed):
    torch.manual_seed(seed)
    torch.cuda.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def make_scheduler(optimizer):
    if args.scheduler == "linear":
        from transformers import get_scheduler

        return get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=4)
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


smp.init()
set_seed(7 + smp.tp_rank())
net = make_net()
if args.built == "before":
    optimizer = make_optimizer(net.parameters())
    scheduler = make_scheduler(optimizer) if args.scheduler == "inner" else None
    net.to("cuda")
    model = smp.DistributedModel(net)
else:
    model = smp.DistributedModel(net)
    optimizer = make_optimizer(model.parameters())
    scheduler = None
with listening() as lines:
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
assert not lines, "what every script passes is nothing to warn of"
assert isinstance(optimizer, torch.optim.Optimizer)
scheduler = scheduler or make_scheduler(optimizer)


@smp.step
def train_step(model, x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


losses = []
for number in range(4):
    optimizer.zero_grad(set_to_none=True)
    x, y = (t.to("cuda", non_blocking=True) for t in batch(number))
    losses.append(train_step(model, x, y).reduce_mean().item())
    optimizer.step()
    scheduler.step()
assert_close(losses, plain_losses([[0], [1], [2], [3]], make_optimizer, make_scheduler))
