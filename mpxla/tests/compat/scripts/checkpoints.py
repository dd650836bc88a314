"""Behaviours 19, 20: full and partial files, and files of one rank or of every rank."""

import os
import sys

import smdistributed.modelparallel.torch as smp
import torch
import torch.nn.functional as F
from client_lib import assert_close, batch, make_net, plain_losses

what, folder = sys.argv[1:]
smp.init()
torch.cuda.set_device(smp.local_rank())
model = smp.DistributedModel(make_net())
optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.05))


@smp.step
def train_step(model, x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


def train(numbers):
    losses = []
    for number in numbers:
        optimizer.zero_grad()
        x, y = batch(number)
        losses.append(train_step(model, x.cuda(), y.cuda()).reduce_mean().item())
        optimizer.step()
    return losses


expected = plain_losses([[0], [1], [2]], lambda parameters: torch.optim.Adam(parameters, lr=0.05))
if what == "write":
    assert_close(train([0, 1]), expected[:2])
    if smp.dp_rank() == 0:
        partial = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
        smp.save(partial, os.path.join(folder, "partial.pt"), partial=True)
        full = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        smp.save(full, os.path.join(folder, "full.pt"), partial=False)
    torch.save(model.state_dict(), f"{folder}/whole_{smp.rank()}.pt")
    if smp.rank() == 0:
        smp.save({"epoch": 2}, f"{folder}/global.pt")
else:
    device = torch.device("cuda")
    partial = smp.load(f"{folder}/partial.pt", map_location=device, partial=True)
    model.load_state_dict(partial["model"])
    optimizer.load_state_dict(partial["optimizer"])
    assert_close(train([2]), expected[2:])
    full = smp.load(f"{folder}/full.pt", map_location="cpu", partial=False)
    model.load_state_dict(full["model"])
    optimizer.load_state_dict(full["optimizer"])
    assert_close(train([2]), expected[2:])
    whole = torch.load(f"{folder}/whole_{smp.rank()}.pt", map_location="cuda")
    assert all(value.is_cuda for value in whole.values())
    model.load_state_dict(whole)
    if smp.rank() == 0:
        assert smp.load(f"{folder}/global.pt") == {"epoch": 2}
