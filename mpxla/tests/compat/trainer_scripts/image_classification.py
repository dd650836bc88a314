"""Trains a small ViT, in the manner of transformers' run_image_classification.py."""

import numpy as np
import torch
from transformers import (
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

from made_up_data import Rows


def images(count, seed):
    """Images whose brightness says their class."""
    source = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, 3, (count,), generator=source).tolist()
    return Rows(
        [
            {"pixel_values": torch.rand(3, 8, 8, generator=source) + kind, "labels": kind}
            for kind in classes
        ]
    )


def collate(rows):
    return {
        "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        num_labels=3,
    )
    trainer = Trainer(
        model=ViTForImageClassification(config),
        args=args,
        train_dataset=images(32, 1),
        eval_dataset=images(12, 2),
        data_collator=collate,
        compute_metrics=lambda p: {"accuracy": np.mean(p.predictions.argmax(1) == p.label_ids)},
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
