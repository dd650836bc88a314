"""Fine-tunes a BERT for pairs of sentences, in one process: what `bert.py` is compared with."""

import torch
from transformers import BertConfig, BertForSequenceClassification
from transformers import get_linear_schedule_with_warmup as get_schedule

STEPS, LIMIT = 5, 0.05


def make_model():
    torch.manual_seed(2)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=12,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    for parameter in model.bert.embeddings.parameters():
        parameter.requires_grad = False
    return model


def param_groups(model):
    """Deeper layers learn faster; no decay for biases and norms."""
    no_decay = ("bias", "LayerNorm.weight")
    groups = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        layer = 0 if "layer.0." in name else 1
        decay = 0.0 if name.endswith(no_decay) else 0.01
        groups.append({"params": [parameter], "lr": 1e-2 * 0.8 ** (1 - layer)})
        groups[-1] |= {"weight_decay": decay}
    return groups


def batches():
    generator = torch.Generator().manual_seed(6)
    for _ in range(STEPS):
        ids = torch.randint(3, 40, (8, 12), generator=generator)
        lengths = torch.randint(8, 13, (8, 1), generator=generator)
        mask = (torch.arange(12) < lengths).long()
        yield ids * mask, mask, (torch.arange(12) >= 6).long() * mask, (ids[:, 1] > 20).long()


def main():
    model = make_model()
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2, betas=(0.9, 0.98), amsgrad=True)
    scheduler = get_schedule(optimizer, num_warmup_steps=2, num_training_steps=STEPS)
    losses, norms = [], []
    for ids, mask, kinds, labels in batches():
        model.zero_grad()
        loss = model(ids, attention_mask=mask, token_type_ids=kinds, labels=labels)[0]
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item())
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert min(norms) > LIMIT
    return {"losses": losses + norms, "weights": model.state_dict()}
