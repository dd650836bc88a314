"""Turns sentences round: batches on axis 1, masks without a batch, weights used three times."""

import smdistributed.modelparallel.torch as smp
import torch
import torch.nn as nn

from translate_plain import PAD, STEPS, VOCABULARY, batches, make_model, masks, rate

criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1, reduction="sum")


@smp.step(non_split_inputs=["tgt_mask", "num_tokens"], input_split_axes={"src": 1, "tgt": 1})
def train_step(model, src, tgt, tgt_mask, src_padding_mask, tgt_padding_mask, num_tokens):
    tgt_input, tgt_out = tgt[:-1, :], tgt[1:, :]
    logits = model(src, tgt_input, tgt_mask, src_padding_mask, tgt_padding_mask)
    loss = criterion(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))
    loss = loss * smp.num_microbatches() / num_tokens  # the step takes the mean over microbatches
    model.backward(loss)
    return loss, {"hits": ((logits.argmax(-1) == tgt_out) & (tgt_out != PAD)).sum()}


def translate(weights):
    """Greedy, on the host, by a plain model that has the weights."""
    model = make_model()
    model.load_state_dict({name: value.cpu() for name, value in weights.items()})
    assert model.generator.weight is model.src_embed.weight
    model.eval()
    src, tgt = next(iter(batches()))
    ys = tgt[:1]
    with torch.no_grad():
        for _ in range(len(src)):
            logits = model(src, ys, *masks(src, ys))
            ys = torch.cat([ys, logits[-1:].argmax(-1)])
    return ys


def main():
    smp.init({"partitions": 2, "microbatches": 2, "memory_weight": 0.5, "ddp": False})
    device = torch.device("cuda", smp.local_rank())
    torch.cuda.set_device(device)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.9, 0.98), eps=1e-9)
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, rate)
    losses = []
    for src, tgt in batches():
        optimizer.zero_grad()
        moved = [mask.to(device) for mask in masks(src, tgt[:-1])]
        num_tokens = (tgt[1:] != PAD).sum().to(device)
        loss, counts = train_step(model, src.to(device), tgt.to(device), *moved, num_tokens)
        optimizer.step()
        scheduler.step()
        losses.append(loss.reduce_mean().item())
        assert 0 <= counts["hits"].reduce_sum().item() <= num_tokens.item()
    assert len(losses) == STEPS
    weights = model.state_dict()
    assert translate(weights).max() < VOCABULARY
    return {"losses": losses, "weights": weights}


if __name__ == "__main__":
    found = main()
