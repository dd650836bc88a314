"""One body per behaviour, on threads and on processes (gloo, and XLA's collectives)."""

import threading
import time

import pytest
import torch

from mpxla.comm.loopback import LoopbackTransport
from mpxla.comm.packing import as_bytes
from mpxla.errors import PeerFailure, RankMismatch, TopologyError
from mpxla.tests.comm.worlds import run_host, run_threads, run_xla

pytestmark = pytest.mark.ranks


# The programs of the third have tests of their own (test_xla, test_parity_xla).
XLA = pytest.param(run_xla, marks=pytest.mark.slow)


@pytest.fixture(params=[run_threads, run_host, XLA], ids=["threads", "host", "xla"])
def run(request):
    return request.param


@pytest.fixture(params=[run_threads, run_host], ids=["threads", "host"])
def run_buffered(request):
    """Where messages do not wait for their receiver; test_xla has the rules of the other kind."""
    return request.param


DTYPES = [torch.bool, torch.int64, torch.bfloat16, torch.float16, torch.float64, torch.float32]


def bundle():
    generator = torch.Generator().manual_seed(1)
    shapes = [(), (3,), (0, 4), (5, 7), (2, 3, 4)]
    tensors = [
        torch.randint(0, 2, shape, generator=generator).to(dtype)
        for dtype in DTYPES
        for shape in shapes
    ]
    return [*tensors, torch.arange(12.0).view(3, 4).T, torch.arange(200_000)]


def exchange_bundle(transport):
    if transport.rank == 0:
        transport.send(bundle(), 1, "forward").result()
        return None
    return transport.recv(bundle(), 0, "forward").result()


def test_bundle_of_all_dtypes_and_shapes_arrives_bit_by_bit(run):
    received = run(exchange_bundle, 2)[1]
    for original, copy in zip(bundle(), received, strict=True):
        assert copy.dtype == original.dtype
        assert copy.shape == original.shape
        assert torch.equal(as_bytes(copy), as_bytes(original))


def exchange_one_by_one(transport):
    peer = 1 - transport.rank
    received = [transport.recv([tensor], peer, "forward") for tensor in bundle()]
    sent = [transport.send([tensor], peer, "forward") for tensor in bundle()]
    assert [handle.result() for handle in sent] == [None] * len(sent)
    return [tensor for handle in received for tensor in handle.result()]


def test_single_tensors_arrive_both_ways(run_buffered):
    for received in run_buffered(exchange_one_by_one, 2):
        assert all(map(torch.equal, received, bundle()))


def interleave_channels(transport):
    spec = torch.empty(1)
    if transport.rank == 0:
        for value in range(3):
            transport.send([torch.full((1,), float(value))], 1, "forward")
            transport.send([torch.full((1,), 10.0 + value)], 1, "control")
        return transport.recv([spec], 1, "answer").result()[0]
    early = [transport.recv([spec], 0, "forward") for _ in range(2)]
    # Rank 0 sends this channel's first message after that of a channel that nobody reads any more.
    control = [transport.recv([spec], 0, "control").result()[0].item() for _ in range(3)]
    forward = [handle.result()[0].item() for handle in early]
    transport.send([torch.ones(1)], 0, "answer")
    forward.append(transport.recv([spec], 0, "forward").result()[0].item())
    return forward, control


def test_channels_keep_their_order_and_do_not_wait_for_each_other(run):
    answer, received = run(interleave_channels, 2)
    assert answer.item() == 1
    assert received == ([0.0, 1.0, 2.0], [10.0, 11.0, 12.0])


def send_to_busy_rank(transport):
    """Rank 2 does not receive until rank 1 has got everything that rank 0 sent afterwards.

    A `send` that waited for its receiver would never return.
    """
    big = torch.ones(1 << 20)
    if transport.rank == 0:
        slow = [transport.send([big], 2, "forward") for _ in range(4)]
        fast = [transport.send([big * 2], 1, "forward") for _ in range(4)]
        for handle in slow + fast:
            handle.result()
        return None
    if transport.rank == 2:
        transport.recv([torch.empty(1)], 1, "go").result()
    received = [transport.recv([big], 0, "forward").result()[0][0].item() for _ in range(4)]
    if transport.rank == 1:
        transport.send([torch.empty(1)], 2, "go").result()
    return received


def test_slow_receiver_does_not_stall_others(run_buffered):
    _, first, second = run_buffered(send_to_busy_rank, 3)
    assert first == [2.0] * 4
    assert second == [1.0] * 4


def receive_anything(transport):
    if transport.rank == 0:
        transport.send([torch.tensor([1, 2], dtype=torch.int16)], 1, "any")
        return None
    return transport.recv(None, 0, "any").result()


def test_message_of_unknown_size_comes_as_bytes(run):
    received = run(receive_anything, 2)[1]
    assert received.dtype == torch.uint8
    assert received.view(torch.int16).tolist() == [1, 2]


def disagree(transport, num_elements):
    if transport.rank == 0:
        transport.send([torch.zeros(num_elements)], 1, "forward")
        transport.send([torch.ones(1)], 1, "forward")
        return None
    with pytest.raises(RankMismatch) as caught:
        transport.recv([torch.zeros(2, 3, dtype=torch.int64)], 0, "forward").result()
    after = transport.recv([torch.zeros(1)], 0, "forward").result()[0]
    return str(caught.value), after.item()


@pytest.mark.parametrize("num_elements", [1, 6, 400_000])
def test_disagreement_about_specs_shows_both_views(run, num_elements):
    text, after = run(disagree, 2, num_elements)[1]
    assert "rank 1 expected int64[2, 3] from rank 0 on channel 'forward'" in text
    assert f"float32[{num_elements}]" in text
    assert after == 1, "the next message is not affected"


def reduce_in_groups(transport):
    groups = [(0, 2), (1, 2), (0, 1), (0,), (0, 2)]
    transport.make_groups(groups)
    own = [group for group in groups if transport.rank in group]
    if transport.rank == 2:
        own.reverse()  # groups do not wait for each other
    handles = {}
    for group in own:
        term = torch.full((2, 3), 10.0**transport.rank)
        handles[group] = transport.all_reduce(term, group, is_spent=0 in group)
    return {group: handle.result()[1, 2].item() for group, handle in handles.items()}


def test_all_reduce_sums_over_the_group_only(run):
    assert run(reduce_in_groups, 3) == [
        {(0, 2): 101.0, (0, 1): 11.0, (0,): 1.0},
        {(1, 2): 110.0, (0, 1): 11.0},
        {(0, 2): 101.0, (1, 2): 110.0},
    ]


def collect(transport, dtype):
    world = tuple(range(transport.world_size))
    rank = transport.rank
    original = torch.full((3, 2), rank + 1, dtype=dtype).T
    gathered = transport.all_gather(original, world)
    summed = transport.all_reduce(original, world)
    parts = torch.stack([torch.full((2,), 10 * part + rank + 1) for part in world]).to(dtype)
    scattered = transport.reduce_scatter(parts, world)
    spec = original if rank == 1 else torch.empty((2, 3), dtype=dtype, device="meta")
    received = transport.broadcast(spec, 1, world)
    results = [handle.result() for handle in (gathered, summed, scattered, received)]
    assert torch.equal(original, torch.full((2, 3), rank + 1, dtype=dtype)), "operands stay"
    results[3].zero_()
    assert original.count_nonzero() == 6, "results are not shared with operands"
    return [*results[:3], transport.broadcast(spec, 1, world).result()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_collectives_of_a_world(run, dtype):
    for rank, (gathered, summed, scattered, received) in enumerate(run(collect, 3, dtype)):
        assert gathered.dtype == summed.dtype == scattered.dtype == received.dtype == dtype
        assert gathered.shape == (3, 2, 3)
        assert gathered[:, 1, 2].tolist() == [1, 2, 3]
        assert torch.equal(summed, torch.full((2, 3), 6, dtype=dtype))
        assert scattered.tolist() == [30 * rank + 6] * 2
        assert torch.equal(received, torch.full((2, 3), 2, dtype=dtype))


def sum_in_order(transport):
    world = tuple(range(transport.world_size))
    values = [1.0, 2.0**-24, 2.0**-24][transport.rank]
    part = transport.reduce_scatter(torch.full((3, 1), values), world).result()
    total = transport.all_reduce(torch.full((3, 5), values), world).result()
    return part.item(), total


def test_sums_have_the_same_bits_everywhere(run):
    results = run(sum_in_order, 3)
    assert [part for part, _ in results] == [1.0] * 3, "added in the order of ranks"
    assert all(torch.equal(total, results[0][1]) for _, total in results)


def handle_nothing(transport):
    world = tuple(range(transport.world_size))
    empty = torch.empty(0, 3)
    transport.barrier(world).result()
    return [
        tuple(transport.all_reduce(empty, world).result().shape),
        tuple(transport.all_gather(empty, world).result().shape),
        tuple(transport.reduce_scatter(torch.empty(2, 0), world).result().shape),
        tuple(transport.broadcast(empty, 0, world).result().shape),
        transport.all_reduce(torch.tensor(2.0), world).result(),
        transport.all_gather(torch.tensor(True), world).result(),
    ]


def test_collectives_of_empty_tensors_and_scalars(run):
    for result in run(handle_nothing, 2):
        assert result[:4] == [(0, 3), (2, 0, 3), (0,), (0, 3)]
        assert result[4].shape == ()
        assert result[4].item() == 4
        assert result[5].tolist() == [True, True]


def hold_back(transport):
    world = tuple(range(transport.world_size))
    barrier = None
    if transport.rank == 1:
        transport.recv([torch.empty(1)], 0, "go").result()
    else:
        barrier = transport.barrier(world)
        time.sleep(0.3)
        assert not barrier.done()
        transport.send([torch.empty(1)], 1, "go")
    (barrier or transport.barrier(world)).result()


def test_barrier_waits_for_all(run):
    run(hold_back, 2)


def misuse(transport):
    texts = []
    for error, call in [
        (TopologyError, lambda: transport.send([torch.ones(1)], 7, "x")),
        (TopologyError, lambda: transport.recv([torch.ones(1)], transport.rank, "x")),
        (TopologyError, lambda: transport.all_reduce(torch.ones(1), (1, 0))),
        (TopologyError, lambda: transport.all_reduce(torch.ones(1), ())),
        (TopologyError, lambda: transport.barrier((0, 5))),
        (TopologyError, lambda: transport.barrier((1 - transport.rank,))),
        (TopologyError, lambda: transport.broadcast(torch.ones(1), 2, (0, 1))),
        (ValueError, lambda: transport.reduce_scatter(torch.ones(3, 2), (0, 1))),
        (ValueError, lambda: transport.reduce_scatter(torch.tensor(1.0), (0, 1))),
        (TypeError, lambda: transport.all_reduce(torch.tensor([True]), (0, 1))),
        (TypeError, lambda: transport.reduce_scatter(torch.tensor([True, True]), (0, 1))),
    ]:
        with pytest.raises(error) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_misuse_is_told_before_anything_is_sent(run):
    texts = run(misuse, 2)[0]
    expected = [
        "rank 0 cannot exchange messages with rank 7",
        "rank 0 cannot exchange messages with rank 0",
        "group (1, 0) on rank 0: give different global ranks between 0 and 1, ascending",
        "group () on rank 0: give different",
        "group (0, 5) on rank 0: give different",
        "rank 0 called a communication of group (1,), of which it is no member",
        "broadcast from rank 2 in the group (0, 1): rank 2 is no member",
        "over the 2 ranks (0, 1) got a tensor of shape [3, 2]: its first dim has to be 2",
        "got a tensor of shape []",
        "a bool tensor cannot be summed over ranks",
        "a bool tensor cannot be summed over ranks",
    ]
    assert len(texts) == len(expected)
    for text, part in zip(texts, expected, strict=True):
        assert part in text


def leave_early(transport):
    if transport.rank == 1:
        transport.send([torch.ones(100_000)], 0, "forward")
        return None
    time.sleep(0.5)
    assert transport.recv([torch.ones(100_000)], 1, "forward").result()[0].sum() == 100_000
    with pytest.raises(PeerFailure) as caught:
        transport.recv([torch.ones(1)], 1, "forward").result()
    return str(caught.value)


def test_rank_that_left_is_named_and_its_messages_still_come(run, monkeypatch):
    monkeypatch.setattr("mpxla.tests.comm.threads.SETTLE_S", 0.2)
    text = run(leave_early, 2)[0]
    assert "rank 1 finished (left) while rank 0 waited for a 'forward' message from rank 1" in text


def raise_on_rank_1(transport):
    if transport.rank == 1:
        raise ValueError("bad batch")
    with pytest.raises(PeerFailure) as caught:
        transport.recv([torch.ones(1)], 1, "forward").result()
    return str(caught.value)


def test_thread_that_raises_ends_the_waits_of_the_others():
    with pytest.raises(ValueError, match="bad batch"):
        run_threads(raise_on_rank_1, 2)


def meet_differently(transport, has_come):
    if transport.rank == 0:
        handle = transport.barrier((0, 1))
        has_come.set()
    else:
        has_come.wait(30)
        handle = transport.all_gather(torch.ones(1), (0, 1))
    handle.result()


def test_threads_find_different_collectives():
    with pytest.raises((RankMismatch, PeerFailure), match=r"came to all_gather.*came to barrier"):
        run_threads(meet_differently, 2, threading.Event())


def test_a_world_of_one_gets_copies_of_what_it_passes():
    transport, given = LoopbackTransport(), torch.ones(2)
    assert (transport.rank, transport.world_size) == (0, 1)
    reduced = transport.all_reduce(given, (0,)).result()
    sent = transport.broadcast(given, 0, (0,)).result()
    gathered = transport.all_gather(given, (0,)).result()
    given.zero_()
    assert reduced.tolist() == sent.tolist() == [1, 1]
    assert gathered.tolist() == [[1, 1]]
    assert transport.reduce_scatter(torch.ones(1, 2), (0,)).result().tolist() == [1, 1]
    transport.barrier((0,)).result()
    transport.watch.check()
    transport.close()


def test_a_world_of_one_refuses_what_others_refuse():
    transport, one = LoopbackTransport(), torch.ones(2)
    transport.make_groups([(0,)])
    for call in (
        lambda: transport.send([one], 1, "forward"),
        lambda: transport.recv([one], 0, "forward"),
        lambda: transport.all_gather(one, (0, 1)),
        lambda: transport.broadcast(one, 1, (0,)),
        lambda: transport.make_groups([(1,)]),
    ):
        with pytest.raises(TopologyError):
            call()
    with pytest.raises(ValueError, match="its first dim has to be 1"):
        transport.reduce_scatter(one, (0,))
    with pytest.raises(TypeError, match="a bool tensor cannot be summed"):
        transport.all_reduce(one > 0, (0,))
