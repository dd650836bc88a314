"""Image classification with stages by hand, in the manner of PyTorch's ImageNet example."""

import time

import smdistributed.modelparallel.torch as smp
import torch
import torch.backends.cudnn as cudnn
import torch.nn as nn
import torch.nn.functional as F

from resnet_plain import EPOCHS, MICROBATCHES, Block, images


class ResNet(nn.Module):
    """The network, each part of it made in the partition where it belongs."""

    def __init__(self):
        super().__init__()
        with smp.partition(0):
            self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
            self.pool = nn.MaxPool2d(2)
            self.layer1 = nn.Sequential(Block(4))
        with smp.partition(1):
            self.layer2 = nn.Sequential(Block(4, stride=2))
            self.fc = nn.Linear(4, 3)

    def forward(self, x):
        x = self.layer1(self.pool(F.relu(self.stem(x))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.layer2(x), 1), 1))


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum() * 100.0 / target.size(0) for k in topk]


@smp.step
def train_step(model, criterion, target, images):
    output = model(images)
    loss = criterion(output, target)
    model.backward(loss)
    return output, loss


@smp.step
def test_step(model, criterion, target, images):
    output = model(images)
    return output, criterion(output, target)


def main():
    smp.init(
        {
            "partitions": 2,
            "microbatches": MICROBATCHES,
            "pipeline": "interleaved",
            "optimize": "speed",
            "placement_strategy": "cluster",
            "auto_partition": False,
            "default_partition": 0,
            "ddp": False,
        }
    )
    torch.cuda.set_device(smp.local_rank())
    cudnn.benchmark = True
    torch.manual_seed(4)
    model = ResNet().to(memory_format=torch.channels_last)
    model.cuda(smp.local_rank())
    criterion = nn.CrossEntropyLoss().cuda(smp.local_rank())
    optimizer = torch.optim.SGD(
        model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    model = smp.DistributedModel(model, trace_device="gpu")
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1], gamma=0.1)
    best, losses = 0.0, []
    for epoch in range(EPOCHS):
        meter, end = AverageMeter("Loss"), time.time()
        model.train()
        for pixels, target in zip(*(t.split(8) for t in images(24, epoch)), strict=True):
            pixels = pixels.cuda(smp.local_rank(), non_blocking=True)
            target = target.cuda(smp.local_rank(), non_blocking=True)
            optimizer.zero_grad()
            output, loss = train_step(model, criterion, target, pixels)
            output, loss = torch.cat(output.outputs), loss.reduce_mean()
            top1, top2 = accuracy(output, target, topk=(1, 2))
            assert 0 <= top1.item() <= top2.item() <= 100
            meter.update(loss.item(), pixels.size(0))
            optimizer.step()
            losses.append(loss.item())
        torch.cuda.synchronize()
        scheduler.step()
        if smp.rank() == 0:
            print(f"Epoch [{epoch}] {meter.name} {meter.avg:.4f} Time {time.time() - end:.2f}")
        model.eval()
        with torch.no_grad():
            pixels, target = (t.cuda(non_blocking=True) for t in images(8, 99))
            output, loss = test_step(model, criterion, target, pixels)
        (acc1,) = accuracy(torch.cat(output.outputs), target)
        losses.append(loss.reduce_mean().item())
        best = max(acc1.item(), best)
    assert 0 <= best <= 100
    return {"losses": losses, "weights": model.state_dict()}


if __name__ == "__main__":
    found = main()
