"""Behaviours 15, 16: a rank without parameters; hooks after partitioning and after steps."""

import smdistributed.modelparallel.torch as smp
import torch
import torch.nn as nn
import torch.nn.functional as F
from client_lib import Net, assert_close, batch


class WithTail(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Net()
        self.tail = nn.Tanh()

    def forward(self, x):
        return self.tail(self.body(x))


def train_plainly():
    torch.manual_seed(3)
    model, losses = WithTail(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for number in range(3):
        x, y = batch(number)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


smp.init()
torch.cuda.set_device(smp.local_rank())
torch.manual_seed(3)
model = smp.DistributedModel(WithTail())
smp.set_partition(model.get_module().tail, 1)
events = []
model.register_post_partition_hook(
    lambda model, optimizer: events.append(("partition", model.partitioned, optimizer))
)
model.register_post_step_hook(lambda model, optimizer: events.append(("step", optimizer)))
optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))


@smp.step
def train_step(model, x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


losses = []
for number in range(3):
    optimizer.zero_grad(set_to_none=True)
    x, y = batch(number)
    losses.append(train_step(model, x.cuda(), y.cuda()).reduce_mean().item())
    if len(list(model.local_parameters())) > 0:
        optimizer.step()
assert len(list(model.local_parameters())) == (4, 0)[smp.pp_rank()]
assert events == [("partition", True, optimizer), *[("step", optimizer)] * 3]
assert_close(losses, train_plainly())
