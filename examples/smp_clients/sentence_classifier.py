"""torchrun --nproc_per_node 2 -m mpxla.compat examples/smp_clients/sentence_classifier.py \
    --partitions 2

A classifier of Hugging Face's transformers under SMP, for CUDA devices: batches are dictionaries,
steps return the model's own output class.
"""

import json
import os

import smdistributed.modelparallel.torch as smp
import torch
from transformers import get_scheduler, set_seed

from sentence_classifier_plain import make_model, make_parser
from sentence_data import make_loader


def get_arguments():
    """Reads the command line; SageMaker's configuration has the last word."""
    parser = make_parser(__doc__)
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=2)
    args = parser.parse_args()
    given = json.loads(os.environ.get("SM_HP_MP_PARAMETERS", "{}"))
    args.partitions = given.get("partitions", args.partitions)
    return args


class Trainer:
    """Training and evaluation of one model."""

    def __init__(self, args):
        self.args = args
        self.device = torch.device(f"cuda:{smp.local_rank()}")
        model = make_model(args)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        self.model = smp.DistributedModel(model)
        self.optimizer = smp.DistributedOptimizer(self.optimizer)
        self.scheduler = get_scheduler("linear", self.optimizer, 2, args.max_steps)

    @smp.step()
    def forward_backward(model, inputs, scale=1.0):  # noqa: N805 - SMP's users write it like this
        """One microbatch of training."""
        outputs = model(**inputs)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        model.backward(loss * scale)
        return outputs

    @smp.step
    def forward_only(model, inputs):  # noqa: N805 - SMP's users write it like this
        """One microbatch of evaluation."""
        return model(**inputs)

    def batches(self, is_test):
        """Batches of this replica, on the device."""
        loader = make_loader(is_test, self.args.train_batch_size, smp.dp_size(), smp.dp_rank())
        for batch in loader:
            yield {name: value.to(self.device) for name, value in batch.items()}

    def train(self):
        """Trains for `max_steps` updates."""
        self.model.train()
        count = 0
        while count < self.args.max_steps:
            for inputs in self.batches(is_test=False):
                self.model.zero_grad()
                outputs = self.forward_backward(self.model, inputs)
                self.optimizer.step()
                self.scheduler.step()
                count += 1
                if smp.rank() == 0 and count % 4 == 0:
                    rate = self.scheduler.get_last_lr()[0]
                    print(f"{count}: loss {outputs.loss.reduce_mean().item():.4f}, lr {rate:.2e}")
                if count == self.args.max_steps:
                    return

    def evaluate(self):
        """Returns mean loss and accuracy over the test reviews of all replicas."""
        self.model.eval()
        losses, hits = [], []
        with torch.no_grad():
            for inputs in self.batches(is_test=True):
                outputs = self.forward_only(self.model, inputs)
                losses.append(outputs["loss"].reduce_mean())
                logits = torch.cat(outputs["logits"].outputs)
                hits.append((logits.argmax(dim=-1) == inputs["labels"]).float().mean())
        own = torch.stack([torch.stack(losses).mean(), torch.stack(hits).mean()])
        everyone = smp.allgather(own, smp.CommGroup.DP_GROUP)
        return torch.stack([part.cpu() for part in everyone]).mean(dim=0).tolist()


def main():
    """Trains and evaluates."""
    args = get_arguments()
    smp.init({"partitions": args.partitions, "microbatches": args.microbatches, "ddp": True})
    torch.cuda.set_device(smp.local_rank())
    set_seed(5)
    trainer = Trainer(args)
    trainer.train()
    loss, accuracy = trainer.evaluate()
    if smp.rank() == 0:
        print(f"final loss {loss:.6f}, accuracy {accuracy:.4f}")
    return loss


if __name__ == "__main__":
    final_loss = main()
