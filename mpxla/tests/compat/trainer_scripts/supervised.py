"""Fine-tunes a small Llama with TRL's SFTTrainer, in the manner of TRL's sft.py."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer, TrlParser

from made_up_data import sentences


def make_tokenizer():
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, 40)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def texts(count, seed):
    rows = sentences(count, seed, shortest=3, longest=7)
    return Dataset.from_dict({"text": [" ".join(f"w{i}" for i in ids) for ids in rows]})


def main():
    (args,) = TrlParser(SFTConfig).parse_args_and_config()
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        pad_token_id=0,
        eos_token_id=1,
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=texts(32, 1),
        eval_dataset=texts(8, 2),
        processing_class=make_tokenizer(),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
