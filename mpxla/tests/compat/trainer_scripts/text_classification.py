"""Fine-tunes a small BERT to classify sentences, in the manner of transformers' run_glue.py."""

from dataclasses import dataclass

import numpy as np
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

from made_up_data import Rows, sentences


@dataclass
class ModelArguments:
    layers: int = 1
    dropout: float = 0.0
    rows: int = 32
    patience: int = 0
    loss_scale: float = 0.0


def examples(count, seed):
    rows = sentences(count, seed)
    return Rows([{"input_ids": ids, "label": int(ids[0] > 20)} for ids in rows])


def compute_metrics(predictions):
    hits = np.argmax(predictions.predictions, axis=1) == predictions.label_ids
    return {"accuracy": float(hits.mean())}


def main():
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    model_args, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=model_args.layers,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        hidden_dropout_prob=model_args.dropout,
        attention_probs_dropout_prob=model_args.dropout,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=examples(model_args.rows, 1) if args.do_train else None,
        eval_dataset=examples(16, 2),
        compute_metrics=compute_metrics,
    )
    if model_args.patience:
        trainer.add_callback(EarlyStoppingCallback(model_args.patience))
    if model_args.loss_scale:
        scaler = trainer.accelerator.scaler
        scaler.load_state_dict({**scaler.state_dict(), "scale": model_args.loss_scale})
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_state()
    if args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if args.do_predict:
        predictions = trainer.predict(examples(8, 3), metric_key_prefix="predict").predictions
        if trainer.is_world_process_zero():
            np.save(f"{args.output_dir}/predictions.npy", predictions)


if __name__ == "__main__":
    main()
