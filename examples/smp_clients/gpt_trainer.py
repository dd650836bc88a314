"""torchrun --nproc_per_node 2 -m mpxla.compat examples/smp_clients/gpt_trainer.py \
    --pipeline_parallel_degree 2 --training_dir FOLDER

A GPT trainer as SMP's users write it, for CUDA devices: JSON-lines data that the first pipeline
rank reads, hooks, a schedule of the learning rate, gradient accumulation, validation, and
checkpoints of which the newest are kept.
"""

import time

import smdistributed.modelparallel.torch as smp
import torch
import torch.distributed as dist

from gpt_options import make_model, make_parser, make_scheduler, param_groups
from text_data import Dummies, JsonLines, make_loader


def get_arguments():
    """Reads the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--pipeline_parallel_degree", type=int, default=1)
    parser.add_argument("--tensor_parallel_degree", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--fp16", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--logging_freq", type=int, default=2)
    parser.add_argument("--checkpoint_dir")
    parser.add_argument("--checkpoint_freq", type=int, default=2)
    parser.add_argument("--num_kept_checkpoints", type=int, default=2)
    parser.add_argument("--load_partial", type=int, default=0)
    parser.add_argument("--stop_after", type=int, default=0, help="updates, to be resumed later")
    return parser.parse_args()


@smp.step
def train_step(model, args, input_ids, attention_mask):
    """One microbatch of training."""
    output = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)
    loss = output["loss"] / args.gradient_accumulation
    model.backward(loss)
    return loss


@smp.step
def test_step(model, input_ids, attention_mask):
    """One microbatch of validation."""
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]


def open_loader(path, args, is_shuffled):
    """The first pipeline rank reads a file; the others get as many dummies."""
    if smp.pp_rank() == 0:
        dataset = JsonLines(path)
        smp.broadcast(len(dataset), smp.PP_GROUP)
    else:
        dataset = Dummies(smp.recv_from(0, smp.RankType.PP_RANK))
    return make_loader(dataset, args.train_batch_size, smp.dp_size(), smp.dp_rank(), is_shuffled)


def mean_over_replicas(loss):
    """Mean of a loss on the device over the data-parallel group, as a number."""
    dist.all_reduce(loss, group=smp.get_dp_process_group())
    return loss.item() / smp.dp_size()


def validate(model, args, device):
    """Returns the mean loss on the validation file."""
    model.eval()
    losses = []
    with torch.no_grad():
        for input_ids, mask in open_loader(f"{args.training_dir}/valid.jsonl", args, False):
            loss = test_step(model, input_ids.to(device), mask.to(device)).reduce_mean()
            losses.append(mean_over_replicas(loss))
    model.train()
    return sum(losses) / len(losses)


def check_partition(model, optimizer):
    """A hook: every parameter of the optimizer lives on this rank."""
    local = {id(parameter) for parameter in model.local_parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(parameter) for parameter in held} <= local


def train(model, optimizer, scheduler, args, device, start):
    """Trains until `max_steps` updates."""
    train_path = f"{args.training_dir}/train.jsonl"
    total, seen, started = start, 0, time.time()
    last = args.stop_after or args.max_steps
    while total < last:
        for input_ids, mask in open_loader(train_path, args, True):
            seen += 1
            if seen <= start * args.gradient_accumulation:
                continue  # of an earlier run
            is_first = (seen - 1) % args.gradient_accumulation == 0
            if is_first:
                optimizer.zero_grad(set_to_none=True)
            input_ids = input_ids.to(device, non_blocking=True)
            mask = mask.to(device, non_blocking=True)
            loss = train_step(model, args, input_ids, mask).reduce_mean()
            if seen % args.gradient_accumulation:
                continue
            if args.fp16:
                optimizer.clip_master_grads(1.0)
            if len(list(model.local_parameters())) > 0:
                optimizer.step()
            if not (args.fp16 and optimizer.overflow):
                scheduler.step()
            total += 1
            if total % args.logging_freq == 0:
                mean = mean_over_replicas(loss) * args.gradient_accumulation
                if smp.rank() == 0:
                    memory = torch.cuda.max_memory_allocated(device) // 2**20
                    rate = total / (time.time() - started)
                    print(f"({total}) loss {mean:.4f}, {rate:.2f} updates/s, {memory} MiB")
            if args.checkpoint_dir and total % args.checkpoint_freq == 0:
                smp.save_checkpoint(
                    args.checkpoint_dir,
                    tag=f"total_steps{total}",
                    partial=True,
                    model=model,
                    optimizer=optimizer,
                    user_content={"total_steps": total, "scheduler": scheduler.state_dict()},
                    num_kept_partial_checkpoints=args.num_kept_checkpoints,
                )
            if total == last:
                return


def main():
    """Trains, validates and saves."""
    args = get_arguments()
    smp.init(
        {
            "pipeline_parallel_degree": args.pipeline_parallel_degree,
            "tensor_parallel_degree": args.tensor_parallel_degree,
            "microbatches": args.microbatches,
            "fp16": args.fp16 > 0,
            "ddp": True,
        }
    )
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda", smp.local_rank())
    torch.manual_seed(args.seed)
    torch.cuda.manual_seed_all(args.seed + smp.tp_rank())

    with smp.model_creation(
        tensor_parallelism=smp.tp_size() > 1, dtype=torch.float16 if args.fp16 else None
    ):
        model = make_model(args)
    model = smp.DistributedModel(
        model, trace_device="gpu", backward_passes_per_step=args.gradient_accumulation
    )
    model.register_post_partition_hook(check_partition)
    optimizer = torch.optim.AdamW(param_groups(model), lr=args.lr, betas=(0.9, 0.95))
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = make_scheduler(optimizer, args)

    start = 0
    if args.load_partial:
        content = smp.resume_from_checkpoint(args.checkpoint_dir, tag=None, partial=True)
        scheduler.load_state_dict(content["scheduler"])
        start = content["total_steps"]
    model.train()
    train(model, optimizer, scheduler, args, device, start)
    loss = validate(model, args, device)
    if smp.rank() == 0:
        print(f"final validation loss {loss:.6f}")
    if args.checkpoint_dir:
        smp.save_checkpoint(args.checkpoint_dir, tag="fullmodel.pt", partial=False, model=model)
    smp.barrier()
    torch.cuda.empty_cache()
    return loss


if __name__ == "__main__":
    final_loss = main()
