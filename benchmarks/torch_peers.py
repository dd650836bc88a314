"""What PyTorch itself does with the benchmarks' models, on one process and on several.

Replicas take their parts of one batch, so that all peers with as many replicas train alike.
"""

import contextlib
import os
import resource
from collections.abc import Callable
from typing import Any

from timing import resident_bytes, timed

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def memory_of(optimizer: Any, before: int = 0) -> dict[str, int]:
    """Bytes on this rank: an optimizer's tensors, all it updates, and the process's peak.

    Args:
        optimizer: the optimizer.
        before: what the process had before the model was built.
    """
    from torch.distributed.tensor import DTensor

    def local(value: Any) -> int:
        return getattr(value.to_local() if isinstance(value, DTensor) else value, "nbytes", 0)

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [value for p in parameters for value in optimizer.state.get(p, {}).values()]
    return {
        "state_bytes": sum(map(local, states)),
        "held_bytes": sum(local(value) for p in parameters for value in (p, p.grad))
        + sum(map(local, states)),
        "parameter_bytes": sum(map(local, parameters)),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "before_bytes": before,
    }


def _train(
    case: Any,
    model: Any,
    num_microbatches: int,
    warm_up: int,
    steps: int,
    before: int = 0,
    replicas: int = 1,
    not_last: Callable[[], Any] = contextlib.nullcontext,
    after_backward: Callable[[], Any] = lambda: None,
    **options: Any,
) -> dict[str, Any]:
    """Steps of AdamW with `options`, microbatch by microbatch; all but the last in a context."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), **options)
    batch = case.batch(num_microbatches * replicas)
    ids, targets = (t.chunk(replicas)[RANK % replicas] for t in batch)
    parts = list(zip(ids.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True))

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for number, (x, y) in enumerate(parts, 1):
            with contextlib.nullcontext() if number == num_microbatches else not_last():
                loss = case.loss(model(x), y) / num_microbatches
                loss.backward()
            total += loss.item()
        after_backward()
        optimizer.step()
        return total

    return timed(step, warm_up, steps) | memory_of(optimizer, before)


def eager(case: Any, *counts: int) -> dict[str, Any]:
    """Plain PyTorch, one process."""
    return _train(case, case.model(), *counts)


def inductor(case: Any, *counts: int) -> dict[str, Any]:
    """Plain PyTorch with `torch.compile`, one process."""
    model = case.model()
    model.compile()
    return _train(case, model, *counts)


def ddp(case: Any, *counts: int) -> dict[str, Any]:
    """torch's DistributedDataParallel over gloo; reduces in the last microbatch only."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    before = resident_bytes()
    model = torch.nn.parallel.DistributedDataParallel(case.model())
    return _train(case, model, *counts, before, WORLD, model.no_sync)


def fsdp(case: Any, *counts: int) -> dict[str, Any]:
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

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # as `optimizer.step()` of mpxla

    return _train(case, model, *counts, before, WORLD, after_backward=clip)


def torch_tensor(case: Any, *counts: int) -> dict[str, Any]:
    """torch.distributed.tensor.parallel over gloo, with the plan that PyTorch's tutorial shows."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    dist.init_process_group("gloo")
    before = resident_bytes()
    mesh = init_device_mesh("cpu", (WORLD,))
    model = case.model()
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    columns += ("mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    inner = model.model
    parallelize_module(
        inner,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    for block in inner.model.layers:
        plan = {name: ColwiseParallel() for name in columns}
        parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in rows})
    # A fused or foreach update would have to mix whole and split parameters.
    return _train(case, model, *counts, before, foreach=False)


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
    """As `torch_pipelining`, with stages that `torch.compile` compiles."""
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
