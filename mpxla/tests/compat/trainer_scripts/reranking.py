"""Trains a small BERT with sentence-transformers' trainer of cross-encoders."""

import os
from dataclasses import dataclass

import torch
from datasets import Dataset
from sentence_transformers.cross_encoder import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    losses,
)
from transformers import HfArgumentParser, set_seed

from embeddings import make_pretrained, texts


@dataclass
class Chosen:
    loss: str = "BinaryCrossEntropyLoss"
    pretrained: str = ""


def rows(count, seed, loss):
    columns = {"query": texts(count, seed)}
    if loss == "ListNetLoss":
        columns["answers"] = [texts(3, seed + 100 + i) for i in range(count)]
        columns["labels"] = [[i % 2, 1 - i % 2, 0] for i in range(count)]
    else:
        columns["answer"] = texts(count, seed + 10)
        columns["label"] = [float(i % 2) for i in range(count)]
    return Dataset.from_dict(columns)


def main():
    parser = HfArgumentParser((Chosen, CrossEncoderTrainingArguments))
    chosen, args = parser.parse_args_into_dataclasses()
    if not os.path.isdir(chosen.pretrained):
        make_pretrained(chosen.pretrained)
    set_seed(args.seed)
    model = CrossEncoder(chosen.pretrained, num_labels=1, device="cpu")
    torch.nn.init.normal_(model.model.classifier.weight, 0, 0.3)
    trainer = CrossEncoderTrainer(
        model=model,
        args=args,
        train_dataset=rows(32, 1, chosen.loss),
        eval_dataset=rows(8, 2, chosen.loss),
        loss=getattr(losses, chosen.loss)(model),
    )
    trainer.train()
    trainer.save_model()
    trainer.evaluate()
    trainer.save_state()


if __name__ == "__main__":
    main()
