import pytest
import torch

from mpxla.comm.objects import Objects, dump
from mpxla.comm.packing import pack
from mpxla.comm.seal import HEADER_BYTES, Seal
from mpxla.errors import MpxlaError
from mpxla.tests.comm.worlds import run_host, run_threads

pytestmark = pytest.mark.unit

KEY = b"k" * 32


def message(text):
    return torch.tensor(list(text), dtype=torch.uint8)


def sealed(seal, text, channel="object", ranks=(0,)):
    data = message(text)
    return pack([seal.close(data, channel, ranks), data])


def opened(seal, data, channel="object", src=1, ranks=(0,)):
    return bytes(seal.open(data, channel, src, ranks).numpy())


@pytest.mark.parametrize("text", [b"", b"x", b"x" * 5000])
def test_messages_come_through(text):
    sender, receiver = Seal(1, KEY), Seal(0, KEY)
    for _ in range(3):
        assert opened(receiver, sealed(sender, text)) == text


def test_what_was_changed_is_refused():
    sender, receiver = Seal(1, KEY), Seal(0, KEY)
    changed = sealed(sender, b"pay 1")
    changed[-1] += 1
    with pytest.raises(MpxlaError, match=r"do not come from rank 1 of this job.*not opened"):
        opened(receiver, changed)


@pytest.mark.parametrize("size", [0, 5, HEADER_BYTES - 1, HEADER_BYTES])
def test_messages_without_a_seal_are_refused(size):
    with pytest.raises(MpxlaError, match="seal of message 0 is wrong"):
        opened(Seal(0, KEY), torch.zeros(size, dtype=torch.uint8))


def test_repeated_and_reordered_messages_are_refused():
    sender = Seal(1, KEY)
    first, second = sealed(sender, b"first"), sealed(sender, b"second")
    receiver = Seal(0, KEY)
    assert opened(receiver, first) == b"first"
    with pytest.raises(MpxlaError, match="repeated on their way"):
        opened(receiver, first)
    with pytest.raises(MpxlaError, match="seal of message 0 is wrong"):
        opened(Seal(0, KEY), second)


@pytest.mark.parametrize(
    "way",
    [
        {"channel": "control"},
        {"src": 2},
        {"ranks": (2,)},
        {"ranks": (0, 1)},
    ],
    ids=str,
)
def test_messages_of_another_way_are_refused(way):
    data = sealed(Seal(1, KEY), b"x")
    with pytest.raises(MpxlaError, match="do not come from rank"):
        opened(Seal(0, KEY), data, **way)


def test_messages_of_another_session_are_refused():
    with pytest.raises(MpxlaError, match="do not come from rank 1"):
        opened(Seal(0, KEY), sealed(Seal(1, b"another key"), b"x"))


class Exploit:
    """Creates a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def forge(transport, path, kind):
    """Rank 1 plays somebody who writes into the connection and does not know the key."""
    if transport.rank == 1:
        transport.seal._key = b"a guess"
        objects = Objects(transport)
        if kind == "send":
            data = dump(Exploit(path), "a forgery")
            header = transport.seal.close(data, "object", (0,))
            transport.send([header, data], 0, "object").result()
        if kind == "bare":
            transport.send([dump(Exploit(path), "a forgery")], 0, "object").result()
        if kind == "allgather":
            with pytest.raises(MpxlaError):
                objects.allgather(Exploit(path), (0, 1))
        return None
    objects = Objects(transport)
    with pytest.raises(MpxlaError, match=r"do not come from rank 1.*were not opened") as caught:
        if kind == "allgather":
            objects.allgather("hello", (0, 1))
        else:
            objects.recv_from(1)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["send", "bare", "allgather"])
def test_forged_objects_are_not_unpickled(tmp_path, kind):
    path = tmp_path / "executed"
    run_threads(forge, 2, path, kind)
    assert not path.exists()


def forge_all(transport, path):
    return [forge(transport, path, kind) for kind in ("send", "allgather")]


@pytest.mark.ranks
def test_forged_objects_over_gloo_are_not_unpickled(tmp_path):
    path = tmp_path / "executed"
    texts, _ = run_host(forge_all, 2, path)
    assert "channel 'object'" in texts[0] and not path.exists()
