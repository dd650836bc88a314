"""torchrun --nproc_per_node 2 examples/llama_finetune/train.py [--stages 2] [--checkpoint-dir DIR]

Trains a Llama on packed text. A model takes --stages times --tensor-parallel devices; what is left
of the processes are replicas. For large models, replicas divide the optimizer's state
(--shard-optimizer-state) or parameters and gradients too (--shard-parameters), --bf16 halves
parameters and activations, and --activation-checkpointing keeps only the input of each layer. A run
with a --checkpoint-dir that holds a checkpoint goes on from it. --log-dir receives the loss, tokens
per second and the share of the devices' peak (run_log.py says how it is measured).
"""

import time
from pathlib import Path

import torch
from transformers import get_cosine_schedule_with_warmup

import mpxla as smp
from llama_data import batch_of_step, generate, make_model_and_blocks, make_parser
from run_log import RunLog, matmul_rate, step_operations


@smp.step
def train_step(model, ids):
    """Returns the loss; afterwards its gradients are on the parameters."""
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    model.backward(loss)
    return loss


def parse_arguments():
    """Reads the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--stages", type=int, default=1, help="devices of one replica")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="devices of one stage")
    sharding = parser.add_mutually_exclusive_group()
    sharding.add_argument("--shard-optimizer-state", action="store_true")
    sharding.add_argument(
        "--shard-parameters", type=int, default=1, metavar="N",
        help="replicas over which parameters, gradients and optimizer state are divided",
    )  # fmt: skip
    parser.add_argument("--bf16", action="store_true", help="with float32 masters")
    parser.add_argument("--activation-checkpointing", action="store_true", help="of every layer")
    parser.add_argument("--checkpoint-dir", type=Path, help="save there, and resume from there")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps between saves")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints that stay")
    parser.add_argument("--stop-after", type=int, help="steps; go on later with the same command")
    parser.add_argument("--log-dir", type=Path)
    return parser.parse_args()


def sample(model, tokenizer, args) -> None:
    """Lets rank 0 write some words with the whole model; all ranks call it for the weights."""
    with model.summon_full_params(writeback=False) as plain:
        if smp.rank() == 0:
            print(generate(plain, tokenizer, args.prompt, args.sample_tokens))


class Checkpoints:
    """Saves every some steps, in the background, and keeps the newest."""

    def __init__(self, args, model, optimizer, scheduler) -> None:
        self.args, self.model, self.optimizer, self.scheduler = args, model, optimizer, scheduler

    def resume(self) -> int:
        """Returns how many steps have been done by earlier runs."""
        folder = self.args.checkpoint_dir
        if folder is None or not (folder / "newest").exists():
            return 0
        content = smp.resume_from_checkpoint(folder)
        self.scheduler.load_state_dict(content["scheduler"])
        return content["num_steps"]

    def save(self, num_steps: int) -> None:
        """Saves if it is time."""
        if self.args.checkpoint_dir is None or num_steps % self.args.checkpoint_every:
            return
        smp.save_checkpoint(
            self.args.checkpoint_dir,
            f"step{num_steps}",
            model=self.model,
            optimizer=self.optimizer,
            user_content={"num_steps": num_steps, "scheduler": self.scheduler.state_dict()},
            num_kept_partial_checkpoints=self.args.keep,
            asynchronous=True,
        )


def main() -> list[float]:
    """Returns the loss of every step of this run, as the mean over the replicas."""
    args = parse_arguments()
    smp.init(
        {
            "pipeline_parallel_degree": args.stages,
            "microbatches": args.microbatches,
            "ddp": True,
            "tensor_parallel_degree": args.tensor_parallel,
            "prescaled_batch": True,  # ranks of a tensor-parallel group are fed the same blocks
            "shard_optimizer_state": args.shard_optimizer_state,
            "sharded_data_parallel_degree": args.shard_parameters,
            "sdp_param_persistence_threshold": 10_000,  # so that the small model is divided too
            "sdp_gradient_clipping": args.max_norm,
            "bf16": args.bf16,
        }
    )
    model, tokenizer, blocks = make_model_and_blocks(args)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_tokens = args.batch_size * args.length
    operations = step_operations(model.config, num_parameters, num_tokens, args.length)
    if args.activation_checkpointing:
        model.gradient_checkpointing_enable()
    smp.set_tensor_parallelism(model, args.tensor_parallel > 1)
    model = smp.DistributedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.warmup_steps, args.steps)
    checkpoints = Checkpoints(args, model, optimizer, scheduler)
    log, losses, peak = RunLog(args.log_dir, is_silent=smp.rank() != 0), [], None

    for step in range(checkpoints.resume(), args.stop_after or args.steps):
        ids = batch_of_step(blocks, step, args.batch_size, args.seed)
        started_s = time.perf_counter()
        optimizer.zero_grad()
        loss = train_step(model, ids.chunk(smp.rdp_size())[smp.rdp_rank()]).reduce_mean()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        optimizer.step()
        scheduler.step()
        losses.append(sum(smp.allgather(loss.item(), smp.DP_GROUP)) / smp.dp_size())
        step_s = time.perf_counter() - started_s
        if peak is None:  # now that what is updated is on the device
            device = optimizer.param_groups[0]["params"][0].device
            rate = matmul_rate(device, torch.bfloat16 if args.bf16 else torch.float32)
            peak = sum(smp.allgather(rate, smp.WORLD))
        log.write(
            step + 1,
            loss=losses[-1],
            tokens_per_s=num_tokens / step_s,
            share_of_peak=operations / step_s / peak,
        )
        checkpoints.save(step + 1)
    log.close()
    sample(model, tokenizer, args)
    smp.shutdown()
    return losses


if __name__ == "__main__":
    step_losses = main()
