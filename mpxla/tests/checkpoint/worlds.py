"""Small training runs that are saved and resumed, for the tests of checkpoints."""

import torch
import torch.nn.functional as F
from torch import nn

import mpxla as smp

BATCH = 8
WIDTH = 1024
MICROBATCHES = 2


class TiedNet(nn.Module):
    """Embedding tied to the head, a normalization with buffers, dropout if asked for; a number."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.first = nn.Linear(16, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(WIDTH, 16)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids):
        x = self.drop(torch.tanh(self.norm(self.first(self.embedding(ids)))))
        return self.head(self.second(x)) * self.scale


def one_of(paths, number, step):
    """What the topology of a number resumes from: the one `step` further, or both of two."""
    names = list(paths)
    steps = (0, 1) if len(names) == 2 else (step,)
    return {n: paths[n] for n in (names[(number + k) % len(names)] for k in steps)}


def train_step(model, ids, labels):
    loss = F.cross_entropy(model(ids), labels)
    model.backward(loss)
    return loss


def batch(number, replica=0, num_replicas=1):
    """The data of one step; replicas share it, so that their mean is that of one replica."""
    generator = torch.Generator().manual_seed(100 + number)
    ids = torch.randint(12, (BATCH, 2), generator=generator)
    share = slice(replica * BATCH // num_replicas, (replica + 1) * BATCH // num_replicas)
    return ids[share, 0], ids[share, 1]


class Run:
    """Model, optimizer, scheduler and step function of one session."""

    def __init__(self, stages=2, seed=5, dropout=0.0, build=TiedNet, optimizer=None, **config):
        replicas = int(config.pop("replicas", 1))
        microbatches = config.pop("microbatches", MICROBATCHES // replicas)
        smp.init(
            {
                "pipeline_parallel_degree": stages,
                "microbatches": microbatches,
                "ddp": replicas > 1,
                **config,
            }
        )
        torch.manual_seed(seed)
        self.model = smp.DistributedModel(build(dropout))
        make = optimizer or (lambda p: torch.optim.AdamW(p, lr=0.01))
        self.optimizer = smp.DistributedOptimizer(make(self.model.parameters()))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.step = smp.step(train_step)
        self.number = 0
        self.losses = []

    def train(self, count):
        """Trains for some steps; returns their losses."""
        losses = []
        for _ in range(count):
            self.optimizer.zero_grad()
            data = batch(self.number, smp.rdp_rank(), smp.rdp_size())
            loss = self.step(self.model, *data).reduce_mean()
            self.optimizer.step()
            self.scheduler.step()
            self.number += 1
            losses.append(loss.item())
        self.losses += losses
        return losses

    def save(self, path, tag, **options):
        content = {"scheduler": self.scheduler.state_dict(), "number": self.number}
        return smp.save_checkpoint(
            path, tag, model=self.model, optimizer=self.optimizer, user_content=content, **options
        )

    def resume(self, path, **options):
        content = smp.resume_from_checkpoint(path, **options)
        if content is not None:
            self.scheduler.load_state_dict(content["scheduler"])
            self.number = content["number"]
        return content
