"""Fine-tunes a BERT: frozen embeddings, a rate for every layer, clipping, a linear schedule."""

import logging

import smdistributed.modelparallel.torch as smp
import torch
from smdistributed.modelparallel.torch.nn import FusedLayerNorm  # noqa: F401
from smdistributed.modelparallel.torch.nn.huggingface.bert import (  # noqa: F401
    translate_state_dict_to_hf_bert,
)
from transformers import get_linear_schedule_with_warmup

from bert_plain import LIMIT, STEPS, batches, make_model, param_groups

logger = logging.getLogger(__name__)


@smp.step(non_split_inputs=["weights"])
def train_step(model, *inputs, weights=None):
    ids, mask, kinds, labels = inputs
    logits = model(ids, attention_mask=mask, token_type_ids=kinds)["logits"]
    loss = torch.nn.functional.cross_entropy(logits, labels.view(-1), weight=weights)
    model.backward(loss)
    return loss, logits


def main():
    logging.basicConfig(level=logging.INFO)
    smp.init()
    torch.cuda.set_device(smp.local_rank())
    device = torch.device(f"cuda:{smp.local_rank()}")
    torch.cuda.empty_cache()
    model = make_model().to(device)
    weights = torch.ones(2, device=device)
    model = smp.DistributedModel(model)
    groups = param_groups(model)
    logger.info("%d groups of parameters", len(groups))
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), amsgrad=True)
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, STEPS)
    losses, norms, hits = [], [], 0
    for step, batch in enumerate(batches()):
        model.train()
        batch = tuple(t.to(device) for t in batch)
        model.zero_grad(set_to_none=True)
        loss, logits = train_step(model, *batch, weights=weights)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item())
        optimizer.step()
        scheduler.step()
        losses.append(loss.reduce_mean().item())
        predictions = torch.cat([part.argmax(-1) for part in logits.outputs]).cpu().numpy()
        hits += (predictions == batch[3].cpu().numpy()).sum()
        if smp.rank() == 0:
            logger.info("step %d loss %.4f lr %.2e", step, losses[-1], scheduler.get_last_lr()[-1])
    assert 0 <= hits <= 8 * STEPS
    return {"losses": losses + norms, "weights": model.state_dict()}


if __name__ == "__main__":
    found = main()
