"""torchrun --nproc_per_node 2 -m mpxla.compat --stages 2 --microbatches 4 \
    examples/hf_trainer/train.py [--output_dir FOLDER] [any option of TrainingArguments]

Hugging Face's Trainer teaches a small ViT handwritten digits, which scikit-learn bundles. The
script knows nothing of mpxla: without the launcher it is plain transformers, with equal losses.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import (
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

DEFAULTS = {
    "output_dir": "trainer_output",
    "num_train_epochs": 10,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    "dataloader_drop_last": True,
    "learning_rate": 3e-3,
    "warmup_steps": 50,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "logging_steps": 20,
    "report_to": "none",
}


class Digits(Dataset):
    """Images [1, 8, 8] and their digits."""

    def __init__(self, images: np.ndarray, digits: np.ndarray):
        self.images = torch.from_numpy(images).float().unsqueeze(1) / 16 - 0.5
        self.digits = torch.from_numpy(digits)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index], "labels": self.digits[index]}


def main() -> None:
    """Trains, evaluates and saves."""
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(**DEFAULTS)
    (args,) = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    digits = load_digits()
    images, labels = digits["images"], digits["target"]
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        num_labels=10,
    )
    trainer = Trainer(
        model=ViTForImageClassification(config),
        args=args,
        train_dataset=Digits(images[:-256], labels[:-256]),
        eval_dataset=Digits(images[-256:], labels[-256:]),
        compute_metrics=lambda found: {
            "accuracy": float(np.mean(found.predictions.argmax(axis=1) == found.label_ids))
        },
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
