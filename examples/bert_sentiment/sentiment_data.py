"""Sentences with a sentiment each, a tokenizer trained on them, and the classifier of both scripts.

`sentences.csv` was written for this example: a hundred short sentences for each class.
"""

import argparse
import csv
from pathlib import Path

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch.utils.data import Dataset
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

SENTIMENTS = ("negative", "neutral", "positive")
MAX_LENGTH = 32
_SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def read_sentences(path: Path) -> list[tuple[str, int]]:
    """Sentences of a csv file with the columns sentence and sentiment, and their classes."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows, start=2):
        if row.get("sentiment") not in SENTIMENTS or not row.get("sentence"):
            raise ValueError(
                f"{path}, line {number}: expected a sentence and one of {', '.join(SENTIMENTS)}, "
                f"found {list(row.values())}"
            )
    return [(row["sentence"], SENTIMENTS.index(row["sentiment"])) for row in rows]


def train_tokenizer(sentences: list[str]) -> PreTrainedTokenizerBase:
    """A tokenizer of bytes and frequent pairs of them, the same in every process.

    Not WordPiece, BERT's own: its trainer numbers letters in the order of a hash table, so that
    ranks, and later runs, would disagree about the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=list(_SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    marks = [(mark, tokenizer.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=marks
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=MAX_LENGTH, **_SPECIAL
    )


class Sentences(Dataset):
    """Every fifth sentence for the test, the others for training."""

    def __init__(
        self, rows: list[tuple[str, int]], tokenizer: PreTrainedTokenizerBase, is_test: bool
    ) -> None:
        chosen = [row for number, row in enumerate(rows) if (number % 5 == 0) == is_test]
        encoded = tokenizer(
            [sentence for sentence, _ in chosen],
            padding="max_length",
            truncation=True,
            max_length=MAX_LENGTH,
            return_tensors="pt",
        )
        self.input_ids, self.attention_mask = encoded["input_ids"], encoded["attention_mask"]
        self.labels = torch.tensor([label for _, label in chosen])

    def __len__(self) -> int:
        """Number of sentences."""
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Token ids and mask, int64 [MAX_LENGTH], and the class."""
        return {
            "input_ids": self.input_ids[index],
            "attention_mask": self.attention_mask[index],
            "labels": self.labels[index],
        }


def make_model_and_data(
    args: argparse.Namespace,
) -> tuple[BertForSequenceClassification, PreTrainedTokenizerBase, Sentences, Sentences]:
    """The classifier, its tokenizer, and the sentences for training and for the test."""
    torch.manual_seed(args.seed)
    rows = read_sentences(args.data)
    names = {
        "id2label": dict(enumerate(SENTIMENTS)),
        "label2id": {name: number for number, name in enumerate(SENTIMENTS)},
        "hidden_dropout_prob": args.dropout,
        "attention_probs_dropout_prob": args.dropout,
    }
    if args.model is None:
        tokenizer = train_tokenizer([sentence for sentence, _ in rows])
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=args.width // 16,
            intermediate_size=4 * args.width,
            max_position_embeddings=MAX_LENGTH,
            **names,
        )
        model = BertForSequenceClassification(config)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = BertForSequenceClassification.from_pretrained(args.model, **names)
    train, test = (Sentences(rows, tokenizer, is_test) for is_test in (False, True))
    return model, tokenizer, train, test


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Options of both scripts."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, help="folder of a pretrained BERT; else a small one")
    parser.add_argument("--data", type=Path, default=here / "sentences.csv")
    parser.add_argument("--output-dir", type=Path, help="write model and tokenizer there")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="sentences of all replicas")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=64, help="of the small model")
    parser.add_argument("--layers", type=int, default=2, help="of the small model")
    parser.add_argument("--seed", type=int, default=0)
    return parser
