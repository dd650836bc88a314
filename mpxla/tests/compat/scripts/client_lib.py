"""What the client scripts share, as training programs have such files beside them."""

import contextlib
import logging

import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def make_net():
    torch.manual_seed(3)
    return Net()


def batch(number=0):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(BATCH, 5, generator=generator)
    return x, torch.randint(3, (BATCH,), generator=generator)


def plain_losses(steps, make_optimizer=None, make_scheduler=None):
    """Losses of the plain model on the host; every step has a list of batch numbers."""
    net, losses = make_net(), []
    optimizer = (make_optimizer or (lambda p: torch.optim.SGD(p, lr=0.5)))(net.parameters())
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    for numbers in steps:
        optimizer.zero_grad()
        parts = [F.cross_entropy(net(x), y) for x, y in map(batch, numbers)]
        loss = sum(parts) / len(parts)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def assert_close(found, expected):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=1e-6)


@contextlib.contextmanager
def listening():
    """Collects what is logged."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("mpxla").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("mpxla").removeHandler(handler)
