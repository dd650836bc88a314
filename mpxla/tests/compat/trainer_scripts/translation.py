"""Trains a small T5 to turn sentences round, in the manner of transformers' run_translation.py."""

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

from made_up_data import Rows, sentences


def make_tokenizer():
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, 40)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def pairs(tokenizer, count, seed):
    rows = []
    for ids in sentences(count, seed, shortest=3, longest=6):
        words = [f"w{i}" for i in ids]
        inputs = tokenizer(" ".join(words))["input_ids"]
        labels = [*tokenizer(" ".join(reversed(words)))["input_ids"], 1]
        rows.append({"input_ids": inputs, "attention_mask": [1] * len(inputs), "labels": labels})
    return Rows(rows)


def main():
    (args,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    tokenizer = make_tokenizer()
    config = T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)

    def compute_metrics(predictions):
        tokens = np.where(predictions.predictions == -100, 0, predictions.predictions)
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return {"gen_len": float(np.mean([len(text.split()) for text in texts]))}

    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=pairs(tokenizer, 16, 1),
        eval_dataset=pairs(tokenizer, 8, 2),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=8),
        compute_metrics=compute_metrics if args.predict_with_generate else None,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("eval", trainer.evaluate(max_length=8, num_beams=1))
    result = trainer.predict(pairs(tokenizer, 4, 3), max_length=8, num_beams=2)
    if trainer.is_world_process_zero() and args.predict_with_generate:
        np.save(f"{args.output_dir}/predictions.npy", result.predictions)


if __name__ == "__main__":
    main()
