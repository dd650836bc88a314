"""python examples/smp_clients/gpt_trainer_plain.py --training_dir FOLDER

The plain single-process trainer whose losses `gpt_trainer.py` reaches.
"""

import itertools

import torch

from gpt_options import make_model, make_parser, make_scheduler, param_groups
from text_data import JsonLines, make_loader


def main():
    """Trains, and returns the loss on the validation file."""
    args = make_parser(__doc__).parse_args()
    torch.manual_seed(1234)
    model = make_model(args)
    optimizer = torch.optim.AdamW(param_groups(model), lr=args.lr, betas=(0.9, 0.95))
    scheduler = make_scheduler(optimizer, args)
    train_loader = make_loader(JsonLines(f"{args.training_dir}/train.jsonl"), args.train_batch_size)
    batches = itertools.chain.from_iterable(itertools.repeat(train_loader))
    model.train()
    for _ in range(args.max_steps):
        optimizer.zero_grad()
        for input_ids, attention_mask in itertools.islice(batches, args.gradient_accumulation):
            output = model(input_ids, attention_mask=attention_mask, labels=input_ids)
            (output["loss"] / args.gradient_accumulation).backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    valid = JsonLines(f"{args.training_dir}/valid.jsonl")
    with torch.no_grad():
        losses = [
            model(input_ids, attention_mask=mask, labels=input_ids)["loss"].item()
            for input_ids, mask in make_loader(valid, args.train_batch_size, is_shuffled=False)
        ]
    loss = sum(losses) / len(losses)
    print(f"final validation loss {loss:.6f}")
    return loss


if __name__ == "__main__":
    final_loss = main()
