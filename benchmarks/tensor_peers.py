"""Peers of the benchmark of tensor parallelism: a Llama of transformers, split over the ranks."""

import os
from typing import Any

from timing import resident_bytes, timed

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def torch_tensor(case: Any, num_microbatches: int, warm_up: int, steps: int) -> dict[str, Any]:
    """torch.distributed.tensor.parallel over gloo, with the plan that PyTorch's tutorial shows."""
    import torch
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
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
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

    result = timed(step, warm_up, steps)
    return result | _held(before, model)


def _held(before: int, model: Any) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {"before_bytes": before, "parameter_bytes": sum(p.nbytes for p in local)}


def mpxla_tensor(
    case: Any, num_microbatches: int, warm_up: int, steps: int, **keys: Any
) -> dict[str, Any]:
    """mpxla with all ranks in one tensor-parallel group, which share every batch."""
    import torch

    import mpxla as smp
    from mpxla.session import current

    smp.init(
        {
            "ddp": True,
            "tensor_parallel_degree": WORLD,
            "prescaled_batch": True,
            "microbatches": num_microbatches,
            **keys,
        }
    )
    before = resident_bytes()
    module = case.model()
    smp.set_tensor_parallelism(module)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    ids, targets = case.batch(num_microbatches)

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
    return result | _held(before, model)


def mpxla_tensor_speed(*args: Any) -> dict[str, Any]:
    """The same with norms and residuals on all ranks, as the peer has them."""
    return mpxla_tensor(*args, optimize="speed")


def mpxla_tensor_torch_xla(*args: Any) -> dict[str, Any]:
    """The same as the first on torch_xla."""
    return mpxla_tensor(*args, device="torch_xla")


def mpxla_tensor_fused(*args: Any) -> dict[str, Any]:
    """With collectives inside the programs."""
    return mpxla_tensor(*args, transport="xla")
