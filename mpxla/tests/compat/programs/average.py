"""Distillation by two optimizers; evaluation with averaged weights, which are swapped in."""

import smdistributed.modelparallel.torch as smp
import torch

from average_plain import DECAY, STEPS, batches, distilled, make_models


class Average:
    """Exponential moving average of the parameters that live here."""

    def __init__(self, model, decay):
        self.model, self.decay, self.shadow, self.backup = model, decay, {}, {}

    def register(self):
        for name, param in self.model.local_named_parameters():
            self.shadow[name] = param.data.clone()

    def update(self):
        for name, param in self.model.local_named_parameters():
            self.shadow[name] = (1.0 - self.decay) * param.data + self.decay * self.shadow[name]

    def apply_shadow(self):
        for name, param in self.model.local_named_parameters():
            self.backup[name] = param.data
            param.data = self.shadow[name]

    def restore(self):
        for name, param in self.model.local_named_parameters():
            param.data = self.backup[name]
        self.backup = {}


@smp.step
def train_step(model, x, targets, labels):
    loss = distilled(model(x), targets, labels)
    model.backward(loss)
    return loss


@smp.step
def eval_step(model, x, targets, labels):
    return distilled(model(x), targets, labels)


def main():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": False})
    torch.cuda.set_device(smp.local_rank())
    student, teacher = make_models()
    teacher.cuda()
    model = smp.DistributedModel(student)
    heads = [p for n, p in model.named_parameters() if "head" in n]
    others = [p for n, p in model.named_parameters() if "head" not in n]
    slow = smp.DistributedOptimizer(torch.optim.SGD(others, lr=0.2, momentum=0.9))
    fast = smp.DistributedOptimizer(torch.optim.RMSprop(heads, lr=0.01))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(slow, factor=0.5, patience=0)
    average = Average(model, DECAY)
    model.register_post_partition_hook(lambda model, optimizer: average.register())
    losses, test = [], [t.cuda() for t in next(iter(batches()))]
    for number, batch in enumerate(batches()):
        x, y = (t.cuda(non_blocking=True) for t in batch)
        with torch.no_grad():
            targets = teacher(x)
        slow.zero_grad(set_to_none=True)
        fast.zero_grad(set_to_none=True)
        model.train()
        losses.append(train_step(model, x, targets, y).reduce_mean().item())
        slow.step()
        if number % 2:
            fast.step()
        average.update()
        average.apply_shadow()
        model.eval()
        with torch.no_grad():
            loss = eval_step(model, test[0], teacher(test[0]), test[1]).reduce_mean()
        losses.append(loss.item())
        average.restore()
        plateau.step(losses[-1])
    assert len(losses) == 2 * STEPS
    return {"losses": losses, "weights": model.state_dict(), "rate": slow.param_groups[0]["lr"]}


if __name__ == "__main__":
    found = main()
