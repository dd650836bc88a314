"""python examples/bert_sentiment/classify.py FOLDER "The soup was cold." ["Another sentence." ...]

Says how sentences sound, by a model that one of the training scripts has written: plain
transformers, nothing of mpxla.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def main() -> list[str]:
    """Returns the sentiment of each sentence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("sentences", nargs="+", metavar="sentence")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = AutoModelForSequenceClassification.from_pretrained(args.folder).eval()
    encoded = tokenizer(args.sentences, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        shares = model(
            input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"]
        ).logits.softmax(dim=1)
    names = [model.config.id2label[number] for number in shares.argmax(dim=1).tolist()]
    for sentence, name, share in zip(args.sentences, names, shares.amax(dim=1), strict=True):
        print(f"{name} ({100 * share.item():.0f} %): {sentence}")
    return names


if __name__ == "__main__":
    sentiments = main()
