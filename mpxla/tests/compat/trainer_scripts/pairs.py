"""Trains a small BERT by pairs, with a trainer that does by itself what libraries' trainers do."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

from made_up_data import Rows, sentences


@dataclass
class LossArguments:
    contrastive: bool = False


class Loss(torch.nn.Module):
    """Holds the model, as losses of sentence-transformers do. The rows are [first, second]."""

    def __init__(self, model, is_contrastive):
        super().__init__()
        self.model = model
        self.is_contrastive = is_contrastive

    def forward(self, inputs):
        outputs = self.model(**{k: v for k, v in inputs.items() if k != "margin"})
        chosen, rejected = outputs.logits.chunk(2)
        centered = outputs.logits.square().mean()  # else the bias has a gradient of 0
        if self.is_contrastive:
            scores = chosen @ rejected.T
            return F.cross_entropy(scores, torch.arange(len(scores))) + centered, outputs
        margins = (chosen - rejected)[:, 0] - inputs["margin"]
        return -F.logsigmoid(margins).mean() + centered, outputs


class PairTrainer(Trainer):
    def __init__(self, *args, loss, **kwargs):
        super().__init__(*args, **kwargs)
        self.pair_loss = loss
        self.accuracies = []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = self.pair_loss(inputs)
        chosen, rejected = outputs.logits[:, 0].chunk(2)
        hits = self.accelerator.gather_for_metrics((chosen > rejected).float())
        self.accuracies.append(hits.mean().item())
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return loss, outputs.logits, inputs["input_ids"]

    def log(self, logs, *args):
        if self.accuracies:
            logs["eval_accuracy"] = sum(self.accuracies) / len(self.accuracies)
            self.accuracies.clear()
        super().log(logs, *args)

    def _save(self, output_dir=None, state_dict=None):
        self.model.save_pretrained(output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, folder):
        self.model.load_state_dict(type(self.model).from_pretrained(folder).state_dict())


def collate(examples):
    rows = [e["chosen"] for e in examples] + [e["rejected"] for e in examples]
    margin = torch.tensor([e["margin"] for e in examples])
    return {"input_ids": torch.tensor(rows), "margin": margin}


def pairs(count, seed):
    both = zip(sentences(count, seed), sentences(count, seed + 10), strict=True)
    return Rows([{"chosen": a, "rejected": b, "margin": a[0] / 40} for a, b in both])


def main():
    parser = HfArgumentParser((LossArguments, TrainingArguments))
    loss_args, args = parser.parse_args_into_dataclasses()
    args.remove_unused_columns = False
    args.label_names = []
    set_seed(args.seed)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=0,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    trainer = PairTrainer(
        model=model,
        args=args,
        data_collator=collate,
        train_dataset=pairs(32, 1),
        eval_dataset=pairs(8, 2),
        loss=Loss(model, loss_args.contrastive),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    predictions = trainer.predict(pairs(6, 3)).predictions
    if trainer.is_world_process_zero():
        torch.save(torch.tensor(predictions), f"{args.output_dir}/predictions.pt")


if __name__ == "__main__":
    main()
