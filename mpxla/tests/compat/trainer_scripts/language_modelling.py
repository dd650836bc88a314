"""Trains a small GPT-2 whose embeddings are tied, in the manner of transformers' run_clm.py."""

import math

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from made_up_data import Rows, sentences


def blocks(count, seed):
    """Sentences padded to one length; their padding does not count."""
    rows = []
    for ids in sentences(count, seed, shortest=2, longest=8):
        pad = 8 - len(ids)
        labels = [*ids, *[-100] * pad]
        rows.append({"input_ids": [*ids, *[0] * pad], "labels": labels})
    return Rows(rows)


def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    config = GPT2Config(
        vocab_size=40,
        n_positions=8,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=blocks(32, 1),
        eval_dataset=blocks(12, 2),
        data_collator=default_data_collator,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.save_metrics("eval", metrics)


def accuracy(predictions):
    labels = torch.from_numpy(predictions.label_ids)[:, 1:]
    hits = torch.from_numpy(predictions.predictions)[:, :-1] == labels
    return {"accuracy": hits[labels != -100].float().mean().item()}


if __name__ == "__main__":
    main()
