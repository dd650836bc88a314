"""Gathers across hosts, then inside each: their results, and what they send between hosts."""

import os
import socket
import struct

import pytest
import torch

from mpxla.comm.by_host import rows_by_host
from mpxla.comm.packing import as_bytes
from mpxla.tests.comm.worlds import run_host

BYTES, GATHERS = 100_000, 5
_BYTES_SENT = 200  # where `struct tcp_info` has tcpi_bytes_sent


@pytest.mark.unit
@pytest.mark.parametrize(
    ("ranks", "hosts", "rows"),
    [
        ((0, 1, 2, 3), "aabb", [(0, 1), (2, 3)]),
        ((0, 2, 4, 6, 8, 10), "aaaabbbbcccc", [(0, 2), (4, 6), (8, 10)]),
        ((4, 5, 6, 7), "aaaabbcc", [(4, 5), (6, 7)]),
        ((0, 1, 2, 3), "aaaa", None),  # one host
        ((0, 2), "aabb", None),  # one member on each
        ((0, 1, 2, 3), "abab", None),  # hosts in turns
        ((0, 1, 2, 3), "aaab", None),
        ((0, 1, 2, 3, 4, 5), "aabbbb", None),
        ((0, 1, 2, 3, 4), "aabbb", None),
        ((0, 1, 2, 3, 4, 5), "aaabbc", None),
    ],
)
def test_members_by_host(ranks, hosts, rows):
    assert rows_by_host(ranks, [ord(host) for host in hosts]) == rows


def sent_by_connection():
    """Bytes that this process has sent by every TCP connection, by the ports of its ends."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket
            continue
        with connection:
            if connection.type == socket.SOCK_STREAM and connection.family == socket.AF_INET:
                try:
                    ends = connection.getsockname()[1], connection.getpeername()[1]
                except OSError:  # it listens
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                found[ends] = struct.unpack_from("Q", info, _BYTES_SENT)[0]
    return found


def gather_in_turns(transport, hosts, is_by_host):
    """Gathers some tensors, and then counts what gathers send."""
    group = tuple(range(transport.world_size))
    if is_by_host:
        assert transport.gather_by_host([group], hosts) == [group]
    rank = transport.rank
    parts = [
        torch.arange(6).view(2, 3) + 10 * rank,
        torch.full((3,), rank, dtype=torch.bfloat16),
        torch.tensor(rank % 2 == 0),
        torch.empty(0, 4),
        torch.arange(8.0).view(2, 4).T + rank,
    ]
    gathered = [handle.result() for handle in [transport.all_gather(p, group) for p in parts]]
    part = torch.full((BYTES,), rank, dtype=torch.uint8)
    before = sent_by_connection()
    for _ in range(GATHERS):
        transport.all_gather(part, group).result()
    transport.barrier(group).result()
    after = sent_by_connection()
    return parts, gathered, {ends: after[ends] - before.get(ends, 0) for ends in after}


@pytest.mark.ranks
@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (5, 5, 5, 3, 3, 3)], ids=["2x2", "2x3"])
def test_a_part_goes_to_another_host_once(hosts):
    sent = {}
    for is_by_host in (False, True):
        found = run_host(gather_in_turns, len(hosts), hosts, is_by_host)
        every = [torch.stack(parts) for parts in zip(*(f[0] for f in found), strict=True)]
        for _, gathered, _ in found:
            for value, expected in zip(gathered, every, strict=True):
                assert value.shape == expected.shape
                assert torch.equal(as_bytes(value), as_bytes(expected))
        owner = {ends: rank for rank, (_, _, counts) in enumerate(found) for ends in counts}
        sent[is_by_host] = sum(
            count
            for rank, (_, _, counts) in enumerate(found)
            for ends, count in counts.items()
            if (peer := owner.get(ends[::-1])) is not None and hosts[peer] != hosts[rank]
        )
    size, width = len(hosts), hosts.count(hosts[0])
    # Of two hosts; and gloo's headers, farewells and the lifeline.
    assert sent[False] == pytest.approx(2 * GATHERS * BYTES * (size - 1), rel=0.02)
    assert sent[True] == pytest.approx(2 * GATHERS * BYTES * (size - width), rel=0.02)
