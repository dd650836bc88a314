"""Turns sentences round by a Transformer with tied embeddings, in one process."""

import math

import torch
import torch.nn as nn

VOCABULARY, PAD, STEPS = 24, 0, 5


class Seq2Seq(nn.Module):
    """Source and target [length, batch]; one matrix is both embeddings and the output layer."""

    def __init__(self, width=16):
        super().__init__()
        self.src_embed = nn.Embedding(VOCABULARY, width)
        self.tgt_embed = nn.Embedding(VOCABULARY, width)
        self.register_buffer("positions", torch.randn(12, 1, width) * 0.1)
        self.transformer = nn.Transformer(width, 2, 1, 1, 32, dropout=0.0, bias=False)
        self.generator = nn.Linear(width, VOCABULARY, bias=False)
        self.tgt_embed.weight = self.src_embed.weight
        self.generator.weight = self.tgt_embed.weight
        self.scale = math.sqrt(width)

    def embed(self, table, ids):
        return table(ids) * self.scale + self.positions[: ids.size(0)]

    def forward(self, src, tgt, tgt_mask, src_padding_mask, tgt_padding_mask):
        outs = self.transformer(
            self.embed(self.src_embed, src),
            self.embed(self.tgt_embed, tgt),
            tgt_mask=tgt_mask,
            src_key_padding_mask=src_padding_mask,
            tgt_key_padding_mask=tgt_padding_mask,
            memory_key_padding_mask=src_padding_mask,
        )
        return self.generator(outs)


def rate(step, warmup=3):
    return min((step + 1) ** -0.5, (step + 1) * warmup**-1.5)


def make_model():
    torch.manual_seed(12)
    model = Seq2Seq()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return model


def batches():
    """Pairs of [length, 8]; the last token of half of them is padding."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        words = torch.randint(3, VOCABULARY, (6, 8), generator=generator)
        words[-1, ::2] = PAD
        yield words, torch.cat([torch.ones(1, 8, dtype=torch.int64), words.flip(0)])


def masks(src, tgt):
    tgt_mask = torch.triu(torch.full((len(tgt), len(tgt)), float("-inf")), diagonal=1)
    pads = [torch.zeros(t.T.shape).masked_fill(t.T == PAD, float("-inf")) for t in (src, tgt)]
    return tgt_mask, *pads


def main():
    model = make_model()
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1, reduction="sum")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.9, 0.98), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses = []
    for src, tgt in batches():
        optimizer.zero_grad()
        logits = model(src, tgt[:-1], *masks(src, tgt[:-1]))
        loss = criterion(logits.reshape(-1, VOCABULARY), tgt[1:].reshape(-1))
        loss = loss / (tgt[1:] != PAD).sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": model.state_dict()}
