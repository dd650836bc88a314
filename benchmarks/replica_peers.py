"""Peers of the benchmark of data parallelism: replicas of the benchmark's GPT.

Each replica takes its part of one batch, so that all peers with as many replicas train alike.
"""

import contextlib
import os
import resource
import time
from typing import Any

from timing import resident_bytes, timed

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def memory_of(optimizer: Any) -> dict[str, int]:
    """Bytes of an optimizer's tensors, and the process's peak."""
    tensors = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if hasattr(value, "element_size")
    ]
    return {
        "state_bytes": sum(t.numel() * t.element_size() for t in tensors),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def held_by(optimizer: Any) -> int:
    """Bytes of the parameters, gradients and state that an optimizer updates on this rank."""
    from torch.distributed.tensor import DTensor

    found = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {}).values()
            for value in (p, p.grad, *state):
                local = value.to_local() if isinstance(value, DTensor) else value
                found += getattr(local, "nbytes", 0)
    return found


def fsdp(case: Any, num_microbatches: int, warm_up: int, steps: int) -> dict[str, Any]:
    """torch's FSDP2 over gloo: every block is gathered by itself, and dropped after its use."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    before = resident_bytes()
    mesh = init_device_mesh("cpu", (WORLD,))
    model = case.model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    ids, targets = (t.chunk(WORLD)[RANK] for t in case.batch(num_microbatches * WORLD))
    parts = list(zip(ids.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True))

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for x, y in parts:
            loss = case.loss(model(x), y) / num_microbatches
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # as `optimizer.step()` of mpxla
        optimizer.step()
        return total

    result = timed(step, warm_up, steps)
    return result | memory_of(optimizer) | {"held_bytes": held_by(optimizer)} | _before(before)


def _before(resident: int) -> dict[str, int]:
    """What the process had before the model was built."""
    return {"before_bytes": resident}


def ddp(case: Any, num_microbatches: int, warm_up: int, steps: int) -> dict[str, Any]:
    """torch's DistributedDataParallel over gloo; reduces in the last microbatch only."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    before = resident_bytes()
    model = torch.nn.parallel.DistributedDataParallel(case.model())
    optimizer = torch.optim.AdamW(model.parameters())
    ids, targets = (t.chunk(WORLD)[RANK] for t in case.batch(num_microbatches * WORLD))
    parts = list(zip(ids.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True))

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for number, (x, y) in enumerate(parts):
            is_last = number == num_microbatches - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = case.loss(model(x), y) / num_microbatches
                loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    result = timed(step, warm_up, steps)
    return result | memory_of(optimizer) | {"held_bytes": held_by(optimizer)} | _before(before)


def train(
    case: Any,
    num_microbatches: int,
    warm_up: int,
    steps: int,
    config: dict[str, Any],
    **options: Any,
) -> dict[str, Any]:
    """mpxla as users run it, with a configuration, in replicas of one or two stages."""
    import torch

    import mpxla as smp
    from mpxla.session import current

    smp.init({"ddp": True, "microbatches": num_microbatches, **config})
    before = resident_bytes()
    model = smp.DistributedModel(case.model(), **options)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    count = smp.rdp_size()
    batch = case.batch(num_microbatches * count)
    ids, targets = (t.chunk(count)[smp.rdp_rank()] for t in batch)

    @smp.step
    def train_step(model: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = case.loss(model(ids), targets)
        model.backward(loss)
        return loss

    def step() -> float:
        optimizer.zero_grad()
        loss = train_step(model, ids, targets)
        optimizer.step()
        current().backend.wait()
        return loss.reduce_mean().item()

    result = timed(step, warm_up, steps)
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    whole = [p for p in model.parameters() if not p.is_meta and id(p) not in updated]
    held = held_by(optimizer) + sum(p.nbytes for p in whole)
    return result | memory_of(optimizer) | {"held_bytes": held} | _before(before)


def mpxla_replicas(*args: Any) -> dict[str, Any]:
    """Two replicas."""
    return train(*args, {})


def mpxla_sharded(*args: Any) -> dict[str, Any]:
    """Two replicas that divide the updates."""
    return train(*args, {"shard_optimizer_state": True})


PARTS = {
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 1000,
    "sdp_gradient_clipping": 1e9,
}
GRADIENTS = {"shard_gradients": True, "sdp_param_persistence_threshold": 1000}


def mpxla_parts(*args: Any) -> dict[str, Any]:
    """Two replicas that divide parameters, gradients and state."""
    return train(*args, PARTS)


def mpxla_parts_torch_xla(*args: Any) -> dict[str, Any]:
    """The same on torch_xla."""
    return train(*args, {**PARTS, "device": "torch_xla"})


def mpxla_gradients(*args: Any) -> dict[str, Any]:
    """Two replicas that divide gradients and state."""
    return train(*args, GRADIENTS)


def mpxla_gradients_torch_xla(*args: Any) -> dict[str, Any]:
    """The same on torch_xla."""
    return train(*args, {**GRADIENTS, "device": "torch_xla"})


def mpxla_grid(*args: Any) -> dict[str, Any]:
    """Two replicas of two stages."""
    return train(*args, {"pipeline_parallel_degree": 2})


def mpxla_grid_without_overlap(*args: Any) -> dict[str, Any]:
    """The same, reduced at the end of the step."""
    return train(*args, {"pipeline_parallel_degree": 2}, overlapping_allreduce=False)


def all_reduce(case: Any, num_microbatches: int, warm_up: int, steps: int) -> dict[str, Any]:
    """One all-reduce as large as the gradients: by gloo on the host, and by mpxla's transport."""
    import torch
    import torch.distributed as dist

    import mpxla as smp
    from mpxla.session import current

    smp.init({"ddp": True})
    session = current()
    host = torch.ones(sum(p.numel() for p in case.model().parameters()))
    group = session.topology.dp_group(session.rank)

    def seconds(call: Any) -> float:
        times = []
        for _ in range(warm_up + steps):
            dist.barrier()
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return sorted(times[warm_up:])[steps // 2]

    (tensor,) = session.backend.put([host])
    bare_s = seconds(lambda: dist.all_reduce(host))
    step_s = seconds(lambda: session.transport.all_reduce(tensor, group).result())
    megabytes = host.numel() * 4 / 1e6
    return {
        "step_s": step_s,
        "first_s": step_s,
        "mb_per_s": megabytes / step_s,
        "gloo_mb_per_s": megabytes / bare_s,
    }
