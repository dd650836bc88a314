"""Fine-tunes LoRA adapters of a small Llama, in the manner of PEFT's examples."""

from peft import LoraConfig, get_peft_model
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from made_up_data import Rows, sentences


def rows(count, seed):
    return Rows([{"input_ids": ids, "labels": ids} for ids in sentences(count, seed)])


def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        pad_token_id=0,
    )
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), lora)
    trainer = Trainer(model=model, args=args, train_dataset=rows(32, 1), eval_dataset=rows(8, 2))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
