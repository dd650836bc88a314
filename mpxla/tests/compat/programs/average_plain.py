"""Two optimizers, a teacher and averaged weights, in one process."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

STEPS, DECAY = 6, 0.8


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8))
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x):
        return self.head(self.backbone(x))


def make_models():
    """The student, and the frozen teacher."""
    torch.manual_seed(21)
    return Student(), Student().eval().requires_grad_(False)


def batches():
    generator = torch.Generator().manual_seed(9)
    for _ in range(STEPS):
        yield torch.randn(8, 6, generator=generator), torch.randint(4, (8,), generator=generator)


def distilled(logits, targets, labels):
    soft = F.kl_div(
        F.log_softmax(logits / 2, -1), F.softmax(targets / 2, -1), reduction="batchmean"
    )
    return 0.5 * F.cross_entropy(logits, labels) + 0.5 * soft * 4


def main():
    model, teacher = make_models()
    average = copy.deepcopy(model)
    slow = torch.optim.SGD(model.backbone.parameters(), lr=0.2, momentum=0.9)
    fast = torch.optim.RMSprop(model.head.parameters(), lr=0.01)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(slow, factor=0.5, patience=0)
    losses, test = [], next(iter(batches()))
    for number, (x, y) in enumerate(batches()):
        slow.zero_grad()
        fast.zero_grad()
        loss = distilled(model(x), teacher(x), y)
        loss.backward()
        slow.step()
        if number % 2:
            fast.step()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 1 - DECAY)
            losses += [loss.item(), distilled(average(test[0]), teacher(test[0]), test[1]).item()]
        plateau.step(losses[-1])
    return {"losses": losses, "weights": model.state_dict(), "rate": slow.param_groups[0]["lr"]}
