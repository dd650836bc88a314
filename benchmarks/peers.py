"""One process of one peer: trains one case and prints its step times as JSON.

Started by `data_parallel.py` once per rank and repetition, by `suite.py` once per rank; one core
for each.
"""

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cases import CASES
from replica_peers import (
    all_reduce,
    ddp,
    fsdp,
    memory_of,
    mpxla_gradients,
    mpxla_gradients_torch_xla,
    mpxla_grid,
    mpxla_grid_without_overlap,
    mpxla_parts,
    mpxla_parts_torch_xla,
    mpxla_replicas,
    mpxla_sharded,
)
from tensor_peers import (
    mpxla_tensor,
    mpxla_tensor_fused,
    mpxla_tensor_speed,
    mpxla_tensor_torch_xla,
    torch_tensor,
)
from timing import resident_bytes, timed

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


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


def inductor(*args: Any) -> dict[str, Any]:
    """Plain PyTorch with `torch.compile`, one process."""
    return eager(*args, compiled=True)


def eager(
    case: Any, num_microbatches: int, warm_up: int, steps: int, compiled: bool = False
) -> dict[str, Any]:
    """Plain PyTorch, one process."""
    import torch

    model = case.model()
    if compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters())
    ids, targets = case.batch(num_microbatches)
    parts = list(zip(ids.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True))

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for x, y in parts:
            loss = case.loss(model(x), y) / num_microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return timed(step, warm_up, steps) | memory_of(optimizer)


def lazy_xla(case: Any, num_microbatches: int, warm_up: int, steps: int) -> dict[str, Any]:
    """torch_xla as its documents show it: traced anew for every microbatch, one process."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    model = case.model().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    ids, targets = (t.to(device) for t in case.batch(num_microbatches))
    parts = list(zip(ids.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True))

    def step() -> float:
        optimizer.zero_grad()
        losses = []
        for x, y in parts:
            loss = case.loss(model(x), y) / num_microbatches
            loss.backward()
            losses.append(loss.detach())
            torch_xla.sync()
        optimizer.step()
        torch_xla.sync()
        xm.wait_device_ops()
        return sum(loss.item() for loss in losses)

    return timed(step, warm_up, steps)


def torch_pipelining_compiled(*args: Any) -> dict[str, Any]:
    """The same with stages that `torch.compile` compiles."""
    return torch_pipelining(*args, compiled=True)


def torch_pipelining(
    case: Any, num_microbatches: int, warm_up: int, steps: int, compiled: bool = False
) -> dict[str, Any]:
    """torch.distributed.pipelining with Schedule1F1B over gloo, equal numbers of blocks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

    dist.init_process_group("gloo")
    model = case.model()
    ids, targets = case.batch(num_microbatches)
    pipe = pipeline(
        model,
        (ids[: case.microbatch_size],),
        split_spec={name: SplitPoint.BEGINNING for name in case.cuts(WORLD)},
    )
    stage = pipe.build_stage(RANK, torch.device("cpu"))
    # torch 2.9 probes its neighbours with mismatched dtypes, which gloo refuses.
    stage._get_init_p2p_neighbors_ops = lambda: []
    if compiled:
        stage.submod.compile()
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=case.loss)
    optimizer = torch.optim.AdamW(stage.submod.parameters())

    def step() -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if RANK == 0:
            schedule.step(ids)
        elif RANK == WORLD - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        dist.barrier()
        return float(sum(loss.item() for loss in losses)) / num_microbatches

    return timed(step, warm_up, steps)


BY_HAND = {
    "optimize": "speed",
    "memory_weight": 0.0,
    "pipeline": "interleaved",
    "virtual_pipeline_degree": 1,
}
"""1F1B, as `torch_pipelining`, and automatic partition by compute."""


def mpxla(
    case: Any,
    num_microbatches: int,
    warm_up: int,
    steps: int,
    tuning: Mapping[str, Any] = BY_HAND,
    **keys: Any,
) -> dict[str, Any]:
    """This library, tuned by hand."""
    import torch
    import torch.distributed as dist

    import mpxla as smp
    from mpxla.session import current

    smp.init(
        {
            "pipeline_parallel_degree": WORLD,
            "microbatches": num_microbatches,
            **tuning,
            **keys,
        }
    )
    before = resident_bytes()
    model = smp.DistributedModel(case.model())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    ids, targets = case.batch(num_microbatches)

    @smp.step
    def train_step(model: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = case.loss(model(ids), targets)
        model.backward(loss)
        return loss

    shares: list[float] = []
    receive: list[float] = []
    dispatch: list[float] = []
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
        dispatch.append(run.dispatch_s / run.num_tasks)
        receive.append(run.values.receive_s / run.num_tasks)
        mean = loss.reduce_mean().item()
        dist.barrier()
        return mean

    result = timed(step, warm_up, steps)
    result["wait_share"] = statistics.median(shares[-steps:])
    result["dispatch_ms"] = statistics.median(dispatch[-steps:]) * 1e3
    result["receive_ms"] = statistics.median(receive[-steps:]) * 1e3
    result["update_ms"] = statistics.median(updates[-steps:]) * 1e3
    own = list(model.local_parameters())
    result["num_parameters"] = len(own)
    result["compilations"] = smp.metrics()["compilations"]
    result["parameter_bytes"] = sum(p.nbytes for p in own)
    result["step_bytes"] = result["peak_step_bytes"] - before
    if RANK == 0:
        result["partition"] = model.partition_report()
    return result | memory_of(optimizer)


def mpxla_default(*args: Any) -> dict[str, Any]:
    """The same without tuning keys, as users run it: the plan is chosen by simulation."""
    return mpxla(*args, tuning={})


def mpxla_default_torch_xla(*args: Any) -> dict[str, Any]:
    """The same on torch_xla."""
    return mpxla(*args, tuning={"device": "torch_xla"})


def mpxla_torch_xla(*args: Any) -> dict[str, Any]:
    """Tuned by hand, on torch_xla."""
    return mpxla(*args, device="torch_xla")


PEERS = {
    f.__name__: f
    for f in (
        products,
        eager,
        inductor,
        lazy_xla,
        torch_pipelining,
        torch_pipelining_compiled,
        mpxla,
        mpxla_default,
        mpxla_default_torch_xla,
        mpxla_torch_xla,
        ddp,
        fsdp,
        mpxla_parts,
        mpxla_parts_torch_xla,
        mpxla_gradients,
        mpxla_gradients_torch_xla,
        mpxla_replicas,
        mpxla_sharded,
        mpxla_grid,
        mpxla_grid_without_overlap,
        all_reduce,
        torch_tensor,
        mpxla_tensor,
        mpxla_tensor_speed,
        mpxla_tensor_torch_xla,
        mpxla_tensor_fused,
    )
}

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
    pin_to_core()

    import torch

    torch.set_num_threads(1)
    if "BENCHMARK_SERVE" in os.environ:
        await_turn(args.peer, args.name)
    case = replace(CASES[args.name](), **json.loads(args.case))
    result = PEERS[args.peer](case, args.microbatches, args.warm_up, args.steps)
    print("RESULT " + json.dumps({"rank": RANK, **result}), flush=True)
    os._exit(0)  # peers leave threads behind that would delay the end


if __name__ == "__main__":
    main()
