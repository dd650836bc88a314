"""A small residual network on made-up images, in one process: what `resnet.py` is compared with."""

import torch
import torch.nn as nn
import torch.nn.functional as F

MICROBATCHES = 2
EPOCHS = 2


class Block(nn.Module):
    def __init__(self, width, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(width, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += identity
        return F.relu(out, inplace=True)


def images(count, seed):
    """Images whose corner says their class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    pixels = torch.randn(count, 3, 8, 8, generator=generator)
    pixels[:, :, 0, 0] += 3 * labels[:, None]
    return pixels, labels


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.pool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Block(4))
        self.layer2 = nn.Sequential(Block(4, stride=2))
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        x = self.layer1(self.pool(F.relu(self.stem(x))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.layer2(x), 1), 1))


def main():
    torch.manual_seed(4)
    model = ResNet()
    optimizer = torch.optim.SGD(
        model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1], gamma=0.1)
    losses = []
    for epoch in range(EPOCHS):
        model.train()
        for pixels, labels in zip(*(t.split(8) for t in images(24, epoch)), strict=True):
            optimizer.zero_grad()
            total = 0.0  # batch normalization sees a microbatch, as in SMP
            for x, y in zip(pixels.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
                loss = F.cross_entropy(model(x), y) / MICROBATCHES
                loss.backward()
                total += loss.item()
            optimizer.step()
            losses.append(total)
        scheduler.step()
        model.eval()
        with torch.no_grad():
            pixels, labels = images(8, 99)
            losses.append(F.cross_entropy(model(pixels), labels).item())
    return {"losses": losses, "weights": model.state_dict()}


if __name__ == "__main__":
    found = main()
