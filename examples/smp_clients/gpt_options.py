"""What the plain and the SMP version of the GPT trainer share: options, model, schedule."""

import argparse
import math
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def make_parser(description):
    """The options of both trainers."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--training_dir", default=os.environ.get("SM_CHANNEL_TRAIN", "/tmp/corpus"))
    parser.add_argument("--train_batch_size", type=int, default=8, help="of all replicas together")
    parser.add_argument("--max_steps", type=int, default=6, help="updates")
    parser.add_argument("--gradient_accumulation", type=int, default=2)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--warmup_steps", type=int, default=2)
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--hidden_width", type=int, default=32)
    parser.add_argument("--vocab_size", type=int, default=64)
    parser.add_argument("--max_context_width", type=int, default=16)
    return parser


def make_model(args):
    """A GPT-2 of transformers, without dropout."""
    config = GPT2Config(
        vocab_size=args.vocab_size,
        n_positions=args.max_context_width,
        n_embd=args.hidden_width,
        n_layer=args.num_layers,
        n_head=4,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def param_groups(model):
    """Weight decay for matrices only."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def make_scheduler(optimizer, args):
    """Warm-up, then a cosine down to a tenth."""

    def factor(step):
        if step < args.warmup_steps:
            return (step + 1) / (args.warmup_steps + 1)
        progress = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
