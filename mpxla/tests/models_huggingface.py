"""Models of transformers, unmodified, from small configurations, as subjects of parity runs.

Inputs, labels and masks go in by keyword, and the step returns the library's `ModelOutput`.
"""

from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from mpxla.tests.models import LENGTH, NUM_CLASSES, NUM_TOKENS, WIDTH, Batch, Subject

__all__ = ["SUBJECTS"]


def gpt2() -> nn.Module:
    """Head and token embedding are tied."""
    config = GPT2Config(
        n_embd=WIDTH, n_layer=2, n_head=2, vocab_size=NUM_TOKENS, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """Grouped heads, rotary positions: integer and float constants between stages."""
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=NUM_TOKENS,
        max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def bert() -> nn.Module:
    """Attention mask for every layer, token types, a pooler, labels."""
    config = BertConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
        num_attention_heads=2, vocab_size=NUM_TOKENS, max_position_embeddings=LENGTH,
        num_labels=NUM_CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def call_with_labels(model: Any, batch: Batch) -> Any:
    output = model(**batch)
    model.backward(output.loss)
    return output


def _masked_tokens(count: int) -> Batch:
    mask = torch.ones(count, LENGTH, dtype=torch.int64)
    mask[::2, LENGTH - 2 :] = 0
    return {"input_ids": torch.randint(NUM_TOKENS, (count, LENGTH)), "attention_mask": mask}


def causal_batch(count: int) -> Batch:
    batch = _masked_tokens(count)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {**batch, "labels": labels}


def sentence_batch(count: int) -> Batch:
    types = torch.zeros(count, LENGTH, dtype=torch.int64)
    types[:, LENGTH // 2 :] = 1
    labels = torch.randint(NUM_CLASSES, (count,))
    return {**_masked_tokens(count), "token_type_ids": types, "labels": labels}


SUBJECTS: dict[str, Subject] = {
    "gpt2": Subject(gpt2, call_with_labels, causal_batch, {"transformer.h.0": 1, "lm_head": 1}),
    "llama": Subject(llama, call_with_labels, causal_batch, {"model.layers.0": 1, "lm_head": 1}),
    "bert": Subject(
        bert, call_with_labels, sentence_batch, {"bert.encoder.layer.0": 1, "classifier": 1}
    ),
}
