"""Trains a small Llama on preferences with a trainer of TRL, in the manner of its examples."""

from dataclasses import dataclass

from datasets import Dataset
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    set_seed,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from supervised import make_tokenizer, texts


@dataclass
class Kind:
    reward: bool = False


def preferences(count, seed):
    names = ("prompt", "chosen", "rejected")
    return Dataset.from_dict(
        {name: [f"{t} " for t in texts(count, seed + i)["text"]] for i, name in enumerate(names)}
    )


def make_model(cls, seed):
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        num_labels=1,
    )
    return cls(config)


def main():
    (kind, _) = HfArgumentParser((Kind, DPOConfig)).parse_args_into_dataclasses()
    config = RewardConfig if kind.reward else DPOConfig
    (_, args) = HfArgumentParser((Kind, config)).parse_args_into_dataclasses()
    shared = {
        "args": args,
        "train_dataset": preferences(32, 1),
        "eval_dataset": preferences(8, 5),
        "processing_class": make_tokenizer(),
    }
    if kind.reward:
        trainer = RewardTrainer(model=make_model(LlamaForSequenceClassification, 1), **shared)
    else:
        models = [make_model(LlamaForCausalLM, seed) for seed in (1, 2)]
        trainer = DPOTrainer(model=models[0], ref_model=models[1], **shared)
    trainer.train()
    trainer.save_model()
    trainer.evaluate()
    trainer.save_state()


if __name__ == "__main__":
    main()
