"""Behaviours 11, 12: evaluation steps between training steps; on rank 0 only with one partition."""

import smdistributed.modelparallel.torch as smp
import torch
import torch.nn as nn
import torch.nn.functional as F
from client_lib import Net, assert_close, batch


class Dropping(Net):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5, self.training))


smp.init()
torch.cuda.set_device(smp.local_rank())
torch.manual_seed(3)
model = smp.DistributedModel(Dropping())
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
criterion = nn.CrossEntropyLoss().cuda()


@smp.step
def train_step(model, x, y):
    loss = criterion(model(x), y)
    model.backward(loss)
    return loss


@smp.step
def test_step(model, x, y):
    return F.cross_entropy(model(x), y, reduction="sum")


losses = []
for number in range(2):
    model.train()
    torch.cuda.manual_seed_all(number)
    optimizer.zero_grad()
    x, y = batch(number)
    losses.append(train_step(model, x.cuda(), y.cuda()).reduce_mean().item())
    optimizer.step()
    full = model.state_dict()
    if smp.pp_size() > 1 or smp.rank() == 0:
        model.eval()
        x, y = batch(9)
        with torch.no_grad():
            loss = test_step(model, x.cuda(), y.cuda()).reduce_sum().item()
        plain = Net()
        plain.load_state_dict(full)
        assert_close(loss, F.cross_entropy(plain(x), y, reduction="sum").item())
        model.train()

# The device's seed replays dropout, whatever the host's generator is doing.
torch.manual_seed(100)
x, y = batch(0)
again = []
for seed in (5, 5, 6):
    torch.cuda.manual_seed(seed)
    again.append(train_step(model, x.cuda(), y.cuda()).reduce_mean().item())
assert again[0] == again[1] != again[2]
