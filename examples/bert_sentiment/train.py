"""torchrun --nproc_per_node 2 examples/bert_sentiment/train.py [--stages 2] [--output-dir FOLDER]

Trains BERT to tell negative, neutral and positive sentences apart. Each model is split over
--stages devices; what is left of the processes are replicas, between which a DistributedSampler
divides the sentences. classify.py beside it uses what --output-dir has received.
"""

import torch
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm
from transformers import get_linear_schedule_with_warmup

import mpxla as smp
from sentiment_data import make_model_and_data, make_parser


@smp.step
def train_step(model, batch):
    """Returns the loss; afterwards its gradients are on the parameters."""
    loss = model(**batch).loss
    model.backward(loss)
    return loss


@smp.step
def eval_step(model, input_ids, attention_mask):
    """Returns the scores of the classes [N, 3]."""
    return model(input_ids=input_ids, attention_mask=attention_mask).logits


def make_loader(dataset, args, is_shuffled):
    """A loader of this replica's part of batches of `batch_size` sentences in all."""
    sampler = DistributedSampler(
        dataset, smp.dp_size(), smp.dp_rank(), is_shuffled, args.seed, drop_last=True
    )
    batch_size = args.batch_size // smp.dp_size()
    return DataLoader(dataset, batch_size, sampler=sampler, drop_last=True)


def mean_over_replicas(value: float) -> float:
    """Mean of a number over the replicas; all ranks call it."""
    return sum(smp.allgather(value, smp.DP_GROUP)) / smp.dp_size()


def evaluate(model, loader) -> float:
    """Returns the share of sentences that are told right."""
    model.eval()
    hits = []
    with torch.no_grad():
        for batch in loader:
            logits = eval_step(model, batch["input_ids"], batch["attention_mask"]).concat()
            hits.append(logits.argmax(dim=1).cpu() == batch["labels"])
    model.train()
    return mean_over_replicas(torch.cat(hits).float().mean().item())


def save(model, tokenizer, folder) -> None:
    """Writes a folder that plain transformers reads; all ranks call it, one writes."""
    state = model.state_dict()
    if smp.rank() == 0:
        state = {name: value.cpu() for name, value in state.items()}
        model.get_module().save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)


def main() -> list[float]:
    """Returns the mean loss of every epoch, and the accuracy of the test at the end."""
    parser = make_parser(__doc__)
    parser.add_argument("--stages", type=int, default=1, help="devices of one replica")
    parser.add_argument("--microbatches", type=int, default=4)
    args = parser.parse_args()
    smp.init(
        {
            "pipeline_parallel_degree": args.stages,
            "microbatches": args.microbatches,
            "ddp": True,
        }
    )
    model, tokenizer, train, test = make_model_and_data(args)
    train_loader, test_loader = make_loader(train, args, True), make_loader(test, args, False)
    model = smp.DistributedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    optimizer = smp.DistributedOptimizer(optimizer)
    num_steps = args.epochs * len(train_loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_steps // 10, num_steps)

    results = []
    bar = tqdm(total=num_steps, desc="training", unit="step", disable=smp.rank() != 0)
    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        losses = []
        for batch in train_loader:
            optimizer.zero_grad()
            losses.append(train_step(model, batch).reduce_mean())
            optimizer.step()
            scheduler.step()
            bar.update()
        results.append(mean_over_replicas(torch.stack(losses).mean().item()))
        accuracy = evaluate(model, test_loader)
        if smp.rank() == 0:
            text = f"loss {results[-1]:.4f}, accuracy {100 * accuracy:.1f} %"
            tqdm.write(f"epoch {epoch + 1}: {text}")
    bar.close()

    if args.output_dir:
        save(model, tokenizer, args.output_dir)
    smp.shutdown()
    return [*results, accuracy]


if __name__ == "__main__":
    step_losses = main()
