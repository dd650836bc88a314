"""Behaviour 22: several steps before an update, with and without data parallelism."""

import smdistributed.modelparallel.torch as smp
import torch
import torch.nn.functional as F
from client_lib import assert_close, batch, make_net

smp.init()
torch.cuda.set_device(smp.local_rank())
net = make_net()
model = smp.DistributedModel(net, backward_passes_per_step=2)
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))


@smp.step
def train_step(model, x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


losses = []
for update in range(2):
    for part in range(2):
        x, y = batch(4 * update + 2 * smp.dp_rank() + part)
        losses.append(train_step(model, x.cuda(), y.cuda()).reduce_mean().item())
    optimizer.step()
    optimizer.zero_grad()

plain, expected = make_net(), []
optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
for update in range(2):
    for number in range(2 * smp.dp_size()):
        loss = F.cross_entropy(plain(batch(4 * update + number)[0]), batch(4 * update + number)[1])
        (loss / smp.dp_size()).backward()
        if number // 2 == smp.dp_rank():
            expected.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
assert_close(losses, expected)
