"""Fine-tunes a GPT-2 from a folder, in one process: what `gpt.py` is compared with."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

EPOCHS, BATCH, ACCUMULATED = 2, 8, 2


def make_pretrained(folder):
    """Writes the model that is fine-tuned."""
    torch.manual_seed(8)
    config = GPT2Config(
        vocab_size=32,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)


class Blocks(torch.utils.data.Dataset):
    """Counting sequences."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(5)
        first, stride = torch.randint(1, 32, (2, count, 1), generator=generator)
        self.rows = (first + stride * torch.arange(8)) % 32

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def make_loader(num_replicas=1, replica=0):
    dataset = Blocks(32)
    sampler = torch.utils.data.DistributedSampler(dataset, num_replicas, replica, seed=3)
    return torch.utils.data.DataLoader(dataset, BATCH // num_replicas, sampler=sampler)


def main(folder):
    model = GPT2LMHeadModel.from_pretrained(folder)
    model.transformer.wte.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)
    loader, losses = make_loader(), []
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=4)
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader, start=1):
            loss = model(**batch).loss / ACCUMULATED
            loss.backward()
            losses.append(loss.item())
            if number % ACCUMULATED == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return {"losses": losses, "weights": model.state_dict()}
