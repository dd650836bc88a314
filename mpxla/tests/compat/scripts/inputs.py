"""Behaviours 1, 2, 9: dummy inputs, objects over the pipeline, dictionaries and other arguments."""

import argparse

import smdistributed.modelparallel.torch as smp
import torch
from client_lib import BATCH, assert_close, batch, make_net, plain_losses

smp.init()
torch.cuda.set_device(smp.local_rank())
device = torch.device("cuda", smp.local_rank())

if smp.pp_rank() == 0:
    smp.broadcast({"steps": 2, "weights": torch.ones(BATCH, 1).to(device)}, smp.PP_GROUP)
    plan = {"steps": 2, "weights": torch.ones(BATCH, 1)}
else:
    plan = smp.recv_from(0, smp.RankType.PP_RANK)
assert plan["steps"] == 2 and plan["weights"].shape == (BATCH, 1)

model = smp.DistributedModel(make_net())
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))


@smp.step
def train_step(args, model, batch, nothing, optimizer, criterion, count, **extra):
    assert nothing is None and extra["name"] == "a" and args.scale == 1.0 and count == 7
    assert isinstance(optimizer, torch.optim.Optimizer)
    logits = model(batch["x"].to(device)) * extra["weights"]
    loss = criterion(logits, batch["y"].to("cuda")) * args.scale
    model.backward(loss)
    return loss


def loader():
    for number in range(plan["steps"]):
        x, y = batch(number)
        if smp.pp_rank() > 0:
            x, y = torch.zeros(BATCH, 0), torch.full((BATCH, 0), 77)
        yield {"x": x.cuda(), "y": y.cuda()}


criterion = torch.nn.CrossEntropyLoss().cuda()
args, losses = argparse.Namespace(scale=1.0), []
for inputs in loader():
    optimizer.zero_grad()
    loss = train_step(
        *(args, model, inputs, None, optimizer, criterion, 7),
        **{"weights": plan["weights"].cuda(), "name": "a"},
    )
    optimizer.step()
    losses.append(loss.reduce_mean().item())
assert_close(losses, plain_losses([[0], [1]]))
