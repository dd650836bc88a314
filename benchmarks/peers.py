"""One process of one peer: trains one case and prints its step times as JSON.

Started once per rank by the other benchmarks; one core for each.
"""

import argparse
import functools
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from cases import CASES
from timing import resident_bytes, timed
from torch_peers import (
    RANK,
    WORLD,
    ddp,
    eager,
    fsdp,
    inductor,
    lazy_xla,
    memory_of,
    torch_pipelining,
    torch_pipelining_compiled,
    torch_tensor,
)


def pin_to_core() -> None:
    """One core per rank, before any library starts threads."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[RANK % len(cores)]})


def products(case: Any, num_microbatches: int, warm_up: int, steps: int) -> dict[str, Any]:
    """No training: as many operations as a step's products, at the rate of large square ones."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    ids, targets = case.batch(1)
    with FlopCounterMode(display=False) as counter:
        case.loss(case.model()(ids), targets).backward()
    flops, side = num_microbatches * counter.get_total_flops(), 1024
    count = -(-flops // (2 * side**3))
    left = torch.randn(round(flops / (count * 2 * side**2)), side)
    right = torch.randn(side, side)
    out = torch.empty(left.shape[0], side)

    def step() -> float:
        for _ in range(count):
            torch.mm(left, right, out=out)
        return 0.0

    return timed(step, warm_up, steps) | {"flops": flops}


def dispatch_of(step: Callable[[], object]) -> tuple[float, float]:
    """CPU seconds of the dispatching thread: for forwards and backwards, and to take messages in.

    Wall time would count the device's work where both share a core. Not for steps that are timed:
    a thread's clock takes up to 16 us to read.
    """
    from mpxla.runtime.buffers import LiveValues
    from mpxla.runtime.executor import Executor

    spent = {"run": 0.0, "take": 0.0}
    run_action, take = Executor.run_action, LiveValues.take

    def clocked(key: str, call: Callable[..., Any], *arguments: Any) -> Any:
        started = time.thread_time()
        result = call(*arguments)
        spent[key] += time.thread_time() - started
        return result

    def clocked_run(executor: Any, action: Any, running: Any) -> None:
        if action.op.is_compute:
            clocked("run", run_action, executor, action, running)
        else:
            run_action(executor, action, running)

    with (
        patch.object(Executor, "run_action", clocked_run),
        patch.object(LiveValues, "take", lambda *arguments: clocked("take", take, *arguments)),
    ):
        step()
    return spent["run"] - spent["take"], spent["take"]


def mpxla(
    keys: Mapping[str, Any], case: Any, num_microbatches: int, warm_up: int, steps: int
) -> dict[str, Any]:
    """This library with a configuration; replicas take their parts of one batch."""
    import torch
    import torch.distributed as dist

    import mpxla as smp
    from mpxla.session import current

    smp.init({"microbatches": num_microbatches, **keys})
    before = resident_bytes()
    module = case.model()
    if "tensor_parallel_degree" in keys:
        smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    replicas = smp.rdp_size()
    batch = case.batch(num_microbatches * replicas)
    ids, targets = (t.chunk(replicas)[smp.rdp_rank()] for t in batch)

    @smp.step
    def train_step(model: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = case.loss(model(ids), targets)
        model.backward(loss)
        return loss

    shares: list[float] = []
    updates: list[float] = []

    def step() -> float:
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = train_step(model, ids, targets)
        dispatching = time.thread_time()
        optimizer.step()
        updates.append(time.thread_time() - dispatching)
        current().backend.wait()
        elapsed = time.perf_counter() - started
        run = model.last_run
        shares.append(run.values.wait_s / elapsed)
        mean = loss.reduce_mean().item()
        if smp.pp_size() > 1:
            dist.barrier()  # as `torch_pipelining`
        return mean

    result = timed(step, warm_up, steps) | memory_of(optimizer, before)
    result["wait_share"] = statistics.median(shares[-steps:])
    result["update_ms"] = statistics.median(updates[-steps:]) * 1e3
    dispatch, receive = zip(*(dispatch_of(step) for _ in range(steps)), strict=True)
    num_tasks = model.last_run.num_tasks
    result["dispatch_ms"] = statistics.median(dispatch) / num_tasks * 1e3
    result["receive_ms"] = statistics.median(receive) / num_tasks * 1e3
    own = [p for p in model.local_parameters() if not p.is_meta]
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    result["held_bytes"] += sum(p.nbytes for p in own if id(p) not in updated)
    result["num_parameters"] = len(own)
    result["compilations"] = smp.metrics()["compilations"]
    result["step_bytes"] = result["peak_step_bytes"] - before
    if RANK == 0:
        result["partition"] = model.partition_report()
    return result


STAGES: dict[str, Any] = {"pipeline_parallel_degree": WORLD}
"""The plan is chosen by simulation, as users run it."""
BY_HAND = STAGES | {
    "optimize": "speed",
    "memory_weight": 0.0,
    "pipeline": "interleaved",
    "virtual_pipeline_degree": 1,
}
"""1F1B, as `torch_pipelining`, and automatic partition by compute."""
PARTS = {
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 1000,
    "sdp_gradient_clipping": 1e9,
}
GRADIENTS = {"ddp": True, "shard_gradients": True, "sdp_param_persistence_threshold": 1000}
TENSOR = {"ddp": True, "tensor_parallel_degree": WORLD, "prescaled_batch": True}
"""All ranks in one group, which shares every batch."""

KEYS: dict[str, dict[str, Any]] = {
    "mpxla": BY_HAND,
    "mpxla_default": STAGES,
    "mpxla_replicas": {"ddp": True},
    "mpxla_sharded": {"ddp": True, "shard_optimizer_state": True},
    "mpxla_grid": {"ddp": True, "pipeline_parallel_degree": 2},
    "mpxla_parts": PARTS,
    "mpxla_gradients": GRADIENTS,
    "mpxla_tensor": TENSOR,
    # With norms and residuals on all ranks, as the peer has them.
    "mpxla_tensor_speed": TENSOR | {"optimize": "speed"},
    # With collectives inside the programs.
    "mpxla_tensor_fused": TENSOR | {"transport": "xla"},
}
KEYS |= {
    f"{name}_torch_xla": KEYS[name] | {"device": "torch_xla"}
    for name in ("mpxla", "mpxla_default", "mpxla_parts", "mpxla_gradients", "mpxla_tensor")
}
"""Configurations of this library, by the name of the peer."""

_OTHERS = (products, eager, inductor, lazy_xla, torch_pipelining, torch_pipelining_compiled)
PEERS = {f.__name__: f for f in (*_OTHERS, ddp, fsdp, torch_tensor)}
PEERS |= {name: functools.partial(mpxla, keys) for name, keys in KEYS.items()}

LIBRARIES = {
    "fsdp": "torch.distributed.fsdp",
    "lazy_xla": "torch_xla.core.xla_model",
    "torch_pipelining": "torch.distributed.pipelining",
    "torch_pipelining_compiled": "torch.distributed.pipelining",
}


def await_turn(peer: str, case: str) -> None:
    """Loads libraries beside the other peers, then waits until this one may compile."""
    library = "mpxla" if peer.startswith("mpxla") else LIBRARIES.get(peer, "torch.distributed")
    importlib.import_module(library)
    if case in ("bert", "llama", "vit"):
        importlib.import_module("transformers")
    print("LOADED", flush=True)
    sys.stdin.readline()


def main() -> None:
    """Runs one peer and prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=sorted(PEERS))
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--name", choices=sorted(CASES), default="gpt", help="the model")
    parser.add_argument("--case", default="{}", help="fields of the case as JSON")
    args = parser.parse_args()
    is_free = os.environ.get("BENCHMARK_FREE") == "1"
    if not is_free:
        pin_to_core()

    import torch

    if not is_free:
        torch.set_num_threads(1)
    if "BENCHMARK_SERVE" in os.environ:
        await_turn(args.peer, args.name)
    case = replace(CASES[args.name](), **json.loads(args.case))
    result = PEERS[args.peer](case, args.microbatches, args.warm_up, args.steps)
    print("RESULT " + json.dumps({"rank": RANK, **result}), flush=True)
    os._exit(0)  # peers leave threads behind that would delay the end


if __name__ == "__main__":
    main()
