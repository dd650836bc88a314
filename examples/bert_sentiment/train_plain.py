"""python examples/bert_sentiment/train_plain.py [--output-dir FOLDER] [--model FOLDER]

Trains BERT to tell negative, neutral and positive sentences apart, in plain PyTorch on the CPU.
train.py beside it does the same on several devices; classify.py uses what either has written.
"""

import torch
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm
from transformers import get_linear_schedule_with_warmup

from sentiment_data import make_model_and_data, make_parser


def main() -> list[float]:
    """Returns the mean loss of every epoch, and the accuracy of the test at the end."""
    args = make_parser(__doc__).parse_args()
    model, tokenizer, train, test = make_model_and_data(args)
    # One replica; it is here so that the order of the sentences is that of train.py.
    sampler = DistributedSampler(train, num_replicas=1, rank=0, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test, args.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    num_steps = args.epochs * len(train_loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_steps // 10, num_steps)

    results = []
    bar = tqdm(total=num_steps, desc="training", unit="step")
    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        losses = []
        for batch in train_loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            bar.update()
        results.append(sum(losses) / len(losses))

        model.eval()
        hits = 0
        with torch.no_grad():
            for batch in test_loader:
                hits += (model(**batch).logits.argmax(dim=1) == batch["labels"]).sum().item()
        accuracy = hits / len(test)
        tqdm.write(f"epoch {epoch + 1}: loss {results[-1]:.4f}, accuracy {100 * accuracy:.1f} %")
    bar.close()

    if args.output_dir:
        model.save_pretrained(args.output_dir)
        tokenizer.save_pretrained(args.output_dir)
    return [*results, accuracy]


if __name__ == "__main__":
    step_losses = main()
