"""Behaviours 14, 21: torch.distributed and smp's collectives, with tensors of the device."""

import smdistributed.modelparallel.torch as smp
import torch
import torch.distributed as dist

smp.init()
torch.cuda.set_device(smp.local_rank())
rank = smp.rank()
dist.barrier()
dist.barrier(device_ids=[smp.local_rank()])
assert (dist.get_rank(), dist.get_world_size()) == (rank, smp.size()) == (rank, 2)
sampler = torch.utils.data.DistributedSampler(range(4), shuffle=False)
assert list(sampler) == [rank, rank + 2]

loss = torch.tensor(1.0 + rank, device="cuda")
dist.all_reduce(loss)
assert loss.item() == 3.0 and loss.is_cuda
dist.all_reduce(loss, group=smp.get_dp_process_group())
assert loss.item() == 6.0
dist.all_reduce(loss, op=dist.ReduceOp.MAX, group=smp.get_mp_process_group())
assert loss.item() == 6.0

parts = [torch.zeros(1).cuda() for _ in range(2)]
dist.all_gather(parts, torch.tensor([float(rank)]).cuda())
assert [part.item() for part in parts] == [0.0, 1.0]
work = dist.all_reduce(loss, async_op=True)
work.wait()
assert loss.item() == 12.0
sent = torch.tensor([5.0 if rank == 0 else 0.0], device=torch.cuda.current_device())
dist.broadcast(sent, src=0)
assert sent.item() == 5.0
group = dist.new_group(ranks=[0, 1], backend="nccl")
dist.reduce(sent, dst=0, group=group)

if rank == 0:
    dist.isend(torch.tensor([8.0]).cuda(), dst=1).wait()
else:
    dist.irecv(sent, src=0).wait()
    assert sent.item() == 8.0 and sent.is_cuda

assert smp.allgather(1.5 + rank, smp.DP_GROUP) == [1.5, 2.5]
found = smp.allgather(torch.full((2,), rank).cuda(), smp.CommGroup.DP_GROUP)
assert [part.cpu().tolist() for part in found] == [[0, 0], [1, 1]]
