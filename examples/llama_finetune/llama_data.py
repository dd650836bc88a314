"""Text packed into blocks of equal length, and the Llama of both scripts with its tokenizer.

Without --text it is what the repository says about itself: its README and the pages of `docs/`.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

_REPOSITORY = Path(__file__).parents[2]
_END = "<end>"


def default_texts() -> list[Path]:
    """The pages that come with the repository."""
    return [_REPOSITORY / "README.md", *sorted((_REPOSITORY / "docs").glob("*.md"))]


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer of so many tokens at most."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END)


def pack(texts: list[str], tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """All texts one after the other, cut into blocks: int64 [blocks, length].

    Nothing is padded: a block may hold the end of one text and the beginning of the next, with the
    end token in between. What is left over at the end is dropped.
    """
    ids: list[int] = []
    for text in texts:
        ids += [*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id]
    num_blocks = len(ids) // length
    if num_blocks == 0:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than one block of {length}")
    return torch.tensor(ids[: num_blocks * length]).view(num_blocks, length)


def batch_of_step(blocks: torch.Tensor, step: int, batch_size: int, seed: int) -> torch.Tensor:
    """The blocks of a step: a function of its number, so that a resumed run goes on with the next.

    Each epoch has its own order, and drops what does not fill a batch.
    """
    per_epoch = len(blocks) // batch_size
    if per_epoch == 0:
        raise ValueError(f"{len(blocks)} blocks of text do not fill a batch of {batch_size}")
    epoch, place = divmod(step, per_epoch)
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    order = torch.randperm(len(blocks), generator=generator)
    return blocks[order[place * batch_size : (place + 1) * batch_size]]


def make_model_and_blocks(
    args: argparse.Namespace,
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase, torch.Tensor]:
    """The model, its tokenizer and the packed text."""
    torch.manual_seed(args.seed)
    texts = [path.read_text(encoding="utf-8") for path in args.text or default_texts()]
    if args.model is not None:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = LlamaForCausalLM.from_pretrained(args.model)
    else:
        tokenizer = train_tokenizer(texts, args.vocabulary)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=args.width,
            intermediate_size=3 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=max(1, args.heads // 2),
            max_position_embeddings=max(2 * args.length, 512),
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )
        model = LlamaForCausalLM(config)
    return model, tokenizer, pack(texts, tokenizer, args.length)


def generate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str, num_tokens: int
) -> str:
    """Goes on from a prompt with the most likely tokens, on the CPU."""
    encoded = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        ids = model.eval().generate(
            input_ids=encoded["input_ids"],
            attention_mask=torch.ones_like(encoded["input_ids"]),
            max_new_tokens=num_tokens,
            do_sample=False,
            repetition_penalty=1.2,
            pad_token_id=tokenizer.eos_token_id,
        )
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Options of both scripts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, help="folder of a pretrained Llama; else a small one")
    parser.add_argument("--text", type=Path, action="append", help="a text file; may be repeated")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="blocks of all replicas")
    parser.add_argument("--length", type=int, default=128, help="tokens of a block")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup-steps", type=int, default=10, help="of the learning rate")
    parser.add_argument("--max-norm", type=float, default=1.0, help="of all gradients together")
    parser.add_argument("--vocabulary", type=int, default=1024, help="of the small model")
    parser.add_argument("--width", type=int, default=128, help="of the small model")
    parser.add_argument("--layers", type=int, default=4, help="of the small model")
    parser.add_argument("--heads", type=int, default=4, help="of the small model")
    parser.add_argument("--prompt", default="The model is", help="of the sample at the end")
    parser.add_argument("--sample-tokens", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    return parser
