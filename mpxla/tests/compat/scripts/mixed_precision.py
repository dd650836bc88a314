"""Automatic mixed precision in step functions, with a scaler that is switched off."""

import smdistributed.modelparallel.torch as smp
import torch
import torch.nn.functional as F
from client_lib import assert_close, batch, make_net, plain_losses
from torch.cuda.amp import autocast

smp.init()
torch.cuda.set_device(smp.local_rank())
model = smp.DistributedModel(make_net())
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
scaler = smp.amp.GradScaler(enabled=False)


@smp.step
def train_step(model, scaler, x, y, is_mixed):
    with autocast(is_mixed):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    model.backward(scaler.scale(loss))
    return logits, loss


def train(number, is_mixed):
    optimizer.zero_grad()
    x, y = batch(number)
    logits, loss = train_step(model, scaler, x.cuda(), y.cuda(), is_mixed)
    scaler.step(optimizer)
    scaler.update()
    return {part.dtype for part in logits.outputs}, loss.reduce_mean().item()


expected = plain_losses([[0], [1]])
dtypes, loss = train(0, False)
assert dtypes == {torch.float32}
assert_close(loss, expected[0])
dtypes, loss = train(1, True)
assert dtypes == {torch.bfloat16}
assert 0 < abs(loss - expected[1]) < 0.02, "rounded, and updated by the step before"
