import threading
import time

import pytest
import torch

from mpxla.comm.objects import Objects, dump, restore
from mpxla.errors import MpxlaError
from mpxla.tests.comm.worlds import run_host, run_threads

pytestmark = pytest.mark.ranks


@pytest.fixture(params=[run_threads, run_host], ids=["loopback", "host"])
def run(request):
    return request.param


class Config:
    def __init__(self, **values):
        self.__dict__.update(values)


class Refuses:
    def __reduce__(self):
        return (_refuse, ())


def _refuse():
    raise KeyError("cannot be built")


def copy(obj):
    return restore(dump(obj, "a test"), 0, 1)


def send_and_broadcast(transport):
    objects = Objects(transport)
    if transport.rank == 0:
        objects.send("first", 1)
        objects.broadcast({"second": torch.arange(3)}, (0, 1, 2))
        objects.send(None, 1)
        return None
    received = [objects.recv_from(0)]
    if transport.rank == 1:
        received += [objects.recv_from(0), objects.recv_from(0)]
    return received


def test_recv_from_takes_sends_and_broadcasts_in_order(run):
    _, first, second = run(send_and_broadcast, 3)
    assert first[0] == "first"
    assert first[1]["second"].tolist() == [0, 1, 2]
    assert first[2] is None
    assert second[0]["second"].tolist() == [0, 1, 2]


def wait_for_receiver(transport):
    objects = Objects(transport)
    if transport.rank == 1:
        time.sleep(0.5)
        began_s = time.monotonic()  # one clock for all processes of a host
        return began_s, objects.recv_from(0), objects.recv_from(0)
    objects.send(1, 1)
    returned_s = time.monotonic()
    objects.broadcast(2, (0, 1))
    return returned_s


def test_send_returns_after_the_receiver_has_it(run):
    returned_s, (began_s, *received) = run(wait_for_receiver, 2)
    assert returned_s > began_s
    assert received == [1, 2]


def gather(transport):
    objects = Objects(transport)
    groups = [(0, 2), (0, 1, 2)]
    transport.make_groups(groups)
    rank = transport.rank
    world = objects.allgather({"rank": rank, "loss": torch.tensor(float(rank))}, groups[1])
    part = objects.allgather("x" * rank, groups[0]) if rank != 1 else None
    even = objects.allgather(torch.full((5_000,), rank), groups[1])
    uneven = objects.allgather(torch.full((rank * 1_000_000,), rank), groups[1])
    objects.barrier(groups[1])
    return world, part, [(tensor.numel(), int(tensor.sum())) for tensor in even + uneven]


def test_allgather_is_in_order_of_ranks_whatever_the_sizes(run):
    results = run(gather, 3)
    for world, _, tensors in results:
        assert [entry["rank"] for entry in world] == [0, 1, 2]
        assert [entry["loss"].item() for entry in world] == [0.0, 1.0, 2.0]
        assert tensors[:3] == [(5_000, 0), (5_000, 5_000), (5_000, 10_000)]
        assert tensors[3:] == [(0, 0), (1_000_000, 1_000_000), (2_000_000, 4_000_000)]
    assert [part for _, part, _ in results] == [["", "xx"], None, ["", "xx"]]


def send_large(transport):
    objects = Objects(transport)
    if transport.rank == 0:
        objects.send([torch.ones(30_000_000, dtype=torch.uint8), "end"], 1)
        return None
    tensor, end = objects.recv_from(0)
    return int(tensor.sum(dtype=torch.int64)), end


def test_large_objects(run):
    assert run(send_large, 2)[1] == (30_000_000, "end")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).T,
        torch.tensor(True),
        torch.empty(0, 3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.float16, requires_grad=True),
        torch.tensor([1 + 2j]).conj(),
        torch.eye(3).to_sparse(),
    ],
)
def test_tensors_survive(tensor):
    restored = copy({"t": [tensor]})["t"][0]
    assert type(restored) is torch.Tensor
    assert restored.dtype == tensor.dtype
    assert restored.layout == tensor.layout
    assert restored.requires_grad == tensor.requires_grad
    torch.testing.assert_close(restored, tensor.resolve_conj(), rtol=0, atol=0)


def test_parameters_modules_and_shared_tensors_survive():
    layer = torch.nn.Linear(2, 3)
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    restored_layer, restored, again = copy((layer, parameter, parameter))
    assert torch.equal(restored_layer.weight, layer.weight)
    assert restored_layer.weight.requires_grad
    assert type(restored) is torch.nn.Parameter
    assert not restored.requires_grad
    assert restored is again
    restored_layer.weight.data.zero_()
    assert layer.weight.count_nonzero() > 0


def test_attributes_of_tensors_survive():
    tensor = torch.ones(2)
    tensor.tag = "kept"
    assert copy(tensor).tag == "kept"


def test_views_travel_without_their_storage():
    row = torch.zeros(1000, 1000)[3]
    assert dump(row, "a test").numel() < 8000


def test_part_that_cannot_be_pickled_is_named():
    lock = threading.Lock()
    for obj, path in [
        (lock, "obj, "),
        ({"a": [1, (2, lock)]}, r"obj\['a'\]\[1\]\[1\], "),
        (Config(inner=Config(lock=lock)), r"obj\.inner\.lock, "),
    ]:
        with pytest.raises(
            MpxlaError, match=f"^send to rank 1: {path}<unlocked.*of type lock, cannot be pickled"
        ):
            dump(obj, "send to rank 1")
    with pytest.raises(MpxlaError, match=r"obj\['f'\], <function .*cannot be pickled.*numbers, "):
        dump({"f": lambda: 0}, "send to rank 1")


def test_object_that_contains_itself_and_cannot_be_pickled():
    knot = [threading.Lock()]
    knot.append(knot)
    with pytest.raises(MpxlaError, match=r"obj\[0\], <unlocked"):
        dump(knot, "send")


def test_object_that_cannot_be_built_names_its_sender():
    with pytest.raises(
        MpxlaError, match=r"rank 1 received an object of rank 0 that it cannot unpickle \(KeyError"
    ):
        copy(Refuses())


def send_from_device(transport):
    import torch_xla

    objects = Objects(transport)
    if transport.rank == 0:
        device = torch_xla.device()
        weight = torch.nn.Parameter(torch.ones(2, 3, device=device) * 2)
        view = torch.arange(6, device=device).view(2, 3).T
        objects.send({"weight": weight, "view": view, "bf16": view.to(torch.bfloat16)}, 1)
        transport.send([torch.ones(4, device=device) + 1], 1, "forward").result()
        total = transport.all_reduce(torch.ones(4, device=device), (0, 1)).result()
        return total
    received = objects.recv_from(0)
    received["sent"] = transport.recv([torch.empty(4)], 0, "forward").result()[0]
    transport.all_reduce(torch.ones(4), (0, 1)).result()
    return received


@pytest.mark.torch_xla
def test_tensors_on_a_device_arrive_on_the_host():
    total, received = run_host(send_from_device, 2, timeout_s=120)
    assert all(tensor.device.type == "cpu" for tensor in received.values())
    assert type(received["weight"]) is torch.nn.Parameter
    assert received["weight"].tolist() == [[2, 2, 2], [2, 2, 2]]
    assert received["view"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert received["bf16"].dtype == torch.bfloat16
    assert received["sent"].tolist() == [2, 2, 2, 2]
    assert total.device.type == "cpu"
    assert total.tolist() == [2, 2, 2, 2]
