"""Fine-tunes a classifier from a folder on csv files, with all that transformers' run_glue.py asks
of `TrainingArguments` and `Trainer`.
"""

import logging
import os
import sys
from dataclasses import dataclass

import datasets
import numpy as np
import transformers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)


@dataclass
class DataArguments:
    train_file: str
    validation_file: str
    max_seq_length: int = 16


@dataclass
class ModelArguments:
    model_name_or_path: str


def set_up_logging(args):
    logging.basicConfig(
        format="%(levelname)s - %(name)s - %(message)s",
        handlers=[logging.StreamHandler(sys.stdout)],
    )
    if args.should_log:
        transformers.utils.logging.set_verbosity_info()
    level = args.get_process_log_level()
    logger.setLevel(level)
    datasets.utils.logging.set_verbosity(level)
    transformers.utils.logging.set_verbosity(level)
    transformers.utils.logging.enable_default_handler()
    transformers.utils.logging.enable_explicit_format()
    logger.warning(
        f"process {args.local_process_index} of {args.world_size} on {args.device}, n_gpu "
        f"{args.n_gpu}, {args.parallel_mode.value}, half precision {args.fp16}"
    )
    logger.info(f"arguments {args}")


def last_checkpoint(args):
    if args.resume_from_checkpoint is not None:
        return args.resume_from_checkpoint
    return get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, args = parser.parse_args_into_dataclasses()
    set_up_logging(args)
    set_seed(args.seed)
    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw = datasets.load_dataset("csv", data_files=files, cache_dir=f"{args.output_dir}/cache")
    names = sorted(raw["train"].unique("label"))
    folder = model_args.model_name_or_path
    config = AutoConfig.from_pretrained(folder, num_labels=len(names), finetuning_task="words")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, config=config, ignore_mismatched_sizes=True
    )
    model.config.label2id = {name: number for number, name in enumerate(names)}
    model.config.id2label = {number: name for number, name in enumerate(names)}

    def preprocess(rows):
        result = tokenizer(rows["sentence"], max_length=data_args.max_seq_length, truncation=True)
        result["labels"] = [model.config.label2id[name] for name in rows["label"]]
        return result

    with args.main_process_first(desc="tokenizing"):
        raw = raw.map(preprocess, batched=True, remove_columns=["label"], desc="tokenizing")

    def compute_metrics(predictions):
        found = np.argmax(predictions.predictions, axis=1)
        return {"accuracy": float((found == predictions.label_ids).mean())}

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=raw["train"] if args.do_train else None,
        eval_dataset=raw["validation"] if args.do_eval else None,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
    )
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=last_checkpoint(args))
        metrics = {**result.metrics, "train_samples": len(raw["train"])}
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if args.do_eval:
        metrics = {**trainer.evaluate(), "eval_samples": len(raw["validation"])}
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if args.do_predict:
        rows = raw["validation"].remove_columns("labels")
        found = np.argmax(trainer.predict(rows, metric_key_prefix="predict").predictions, axis=1)
        if trainer.is_world_process_zero():
            with open(os.path.join(args.output_dir, "predict_results.txt"), "w") as file:
                file.writelines(f"{model.config.id2label[number]}\n" for number in found.tolist())
    trainer.create_model_card(finetuned_from=folder, tasks="text-classification")


if __name__ == "__main__":
    main()
