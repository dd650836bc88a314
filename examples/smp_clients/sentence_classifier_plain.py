"""python examples/smp_clients/sentence_classifier_plain.py [--max_steps 24]

The plain single-process script whose losses `sentence_classifier.py` reaches.
"""

import argparse
import itertools

import torch
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

from sentence_data import LENGTH, VOCABULARY_SIZE, make_loader


def make_parser(description):
    """The options of both scripts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--max_steps", type=int, default=24)
    parser.add_argument("--train_batch_size", type=int, default=16, help="of all replicas together")
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--num_layers", type=int, default=2)
    return parser


def make_model(args):
    """A small BERT for two classes, without dropout."""
    config = BertConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        num_hidden_layers=args.num_layers,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def main():
    """Trains, and returns the loss of the test reviews."""
    args = make_parser(__doc__).parse_args()
    torch.manual_seed(5)
    model = make_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = get_scheduler("linear", optimizer, 2, args.max_steps)
    batches = itertools.chain.from_iterable(
        itertools.repeat(make_loader(False, args.train_batch_size))
    )
    for batch in itertools.islice(batches, args.max_steps):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        losses = [model(**b).loss.item() for b in make_loader(True, args.train_batch_size)]
    loss = sum(losses) / len(losses)
    print(f"final loss {loss:.6f}")
    return loss


if __name__ == "__main__":
    final_loss = main()
