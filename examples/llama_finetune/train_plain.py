"""python examples/llama_finetune/train_plain.py [--model FOLDER] [--text FILE] [--steps 200]

Trains a Llama on packed text in plain PyTorch, on the CPU, and lets it write a few words. train.py
beside it does the same on several devices, with checkpoints and logs.
"""

import torch
from transformers import get_cosine_schedule_with_warmup

from llama_data import batch_of_step, generate, make_model_and_blocks, make_parser


def main() -> list[float]:
    """Returns the loss of every step."""
    args = make_parser(__doc__).parse_args()
    model, tokenizer, blocks = make_model_and_blocks(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.warmup_steps, args.steps)
    losses = []
    model.train()
    for step in range(args.steps):
        ids = batch_of_step(blocks, step, args.batch_size, args.seed)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
    print(generate(model, tokenizer, args.prompt, args.sample_tokens))
    return losses


if __name__ == "__main__":
    step_losses = main()
