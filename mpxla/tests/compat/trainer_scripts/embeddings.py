"""Trains a small BERT with sentence-transformers' trainer, in the manner of its examples."""

import os
from dataclasses import dataclass

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import BertConfig, BertModel, HfArgumentParser, PreTrainedTokenizerFast, set_seed

from made_up_data import sentences


@dataclass
class Chosen:
    loss: str = "CosineSimilarityLoss"
    pretrained: str = ""


def make_pretrained(folder):
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2} | {f"w{i}": i for i in range(3, 40)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder)


def texts(count, seed):
    return [" ".join(f"w{i}" for i in ids) for ids in sentences(count, seed)]


def rows(count, seed, loss):
    columns = {
        name: texts(count, seed + 10 * k)
        for k, name in enumerate("abc" if loss == "TripletLoss" else "ab")
    }
    if loss in ("CosineSimilarityLoss", "CoSENTLoss"):
        columns["label"] = [i % 5 / 5 for i in range(count)]
    return Dataset.from_dict(columns)


def main():
    parser = HfArgumentParser((Chosen, SentenceTransformerTrainingArguments))
    chosen, args = parser.parse_args_into_dataclasses()
    if not os.path.isdir(chosen.pretrained):
        make_pretrained(chosen.pretrained)
    set_seed(args.seed)
    modules = [models.Transformer(chosen.pretrained), models.Pooling(16, "mean")]
    model = SentenceTransformer(modules=modules, device="cpu")
    if chosen.loss == "MatryoshkaLoss":
        inner = losses.MultipleNegativesRankingLoss(model)
        loss = losses.MatryoshkaLoss(model, inner, [16, 8])
    else:
        loss = getattr(losses, chosen.loss)(model)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=rows(32, 1, chosen.loss),
        eval_dataset=rows(8, 2, chosen.loss),
        loss=loss,
    )
    trainer.train()
    trainer.save_model()
    trainer.evaluate()
    trainer.save_state()


if __name__ == "__main__":
    main()
