"""Point-to-point messages over a gloo process group: one ordered stream per pair of ranks.

An *outbox* (one thread per destination) takes messages off its queue, waits for their tensors to be
computed, and sends each as an envelope with the payload behind it. An *inbox* (one thread per
source) reads envelopes as they come and hands every message to the receive that was posted for its
channel, or keeps it until one is posted.

    rank 0                                          rank 1
    send -> outbox for 1 --envelope, payload------> inbox from 0 -+-> "forward":  posted receives
            (thread)                                (thread)      +-> "backward": kept messages

Because the inbox takes everything in, a channel nobody reads yet cannot block another one, and the
order in which two channels are read is free. The envelope carries size, specs and channel, so that
ranks which disagree get an error with both views: gloo itself would abort the process when a
message is larger than expected. Small payloads ride in the envelope's own gloo message.

gloo's `is_completed` is not reliable for receives, hence threads that wait. They have to be out of
gloo before the interpreter ends: a thread that comes back later aborts the process. In order, a
last envelope says that nothing follows, which ends the peer's thread; else `interrupt` helps.
"""

import contextlib
import itertools
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mpxla.comm.handle import FailureWatch, Handle
from mpxla.comm.packing import ALIGNMENT_BYTES, Layout, Spec, as_memory, layout, pack, unpack
from mpxla.errors import MpxlaError, RankMismatch

__all__ = ["MAX_CHANNEL_BYTES", "Inbox", "Outbox", "Posted", "interrupt"]

MAX_CHANNEL_BYTES = 32
_TEXT_BYTES = 188
_ENVELOPE = struct.Struct(f"<4s?7xqq8s{MAX_CHANNEL_BYTES}s{_TEXT_BYTES}s")
_MAGIC = b"MPX1"
assert _ENVELOPE.size % ALIGNMENT_BYTES == 0, "what rides behind it would not be aligned"
# A payload of its own costs another round trip, because gloo sends when the receive is posted.
_INLINE_BYTES = 1 << 20
# A view of the envelope's large buffer would waste too much for less than this.
_CLONE_BYTES = 1 << 16
_ENVELOPE_TAG = 1
_PAYLOAD_TAG = 2
_UNUSED_TAG = 3


class _Envelope(NamedTuple):
    """What precedes every payload."""

    is_last: bool
    number: int
    """Messages of this stream before this one."""
    num_bytes: int
    digest: bytes
    channel: str
    text: str
    """The specs in words, perhaps cut off."""

    def write(self) -> bytes:
        return _ENVELOPE.pack(
            _MAGIC,
            self.is_last,
            self.number,
            self.num_bytes,
            self.digest,
            self.channel.encode(),
            self.text.encode()[:_TEXT_BYTES],
        )

    @classmethod
    def read(cls, data: torch.Tensor) -> "_Envelope":
        magic, is_last, number, num_bytes, digest, *names = _ENVELOPE.unpack_from(as_memory(data))
        if magic != _MAGIC or num_bytes < 0:
            raise RankMismatch(f"it begins with {magic!r} and announces {num_bytes} bytes")
        channel, text = (name.rstrip(b"\0").decode(errors="replace") for name in names)
        return cls(is_last, number, num_bytes, digest, channel, text)


class _Message(NamedTuple):
    tensors: Sequence[torch.Tensor]
    channel: str
    handle: Handle[None]


class Outbox:
    """Messages to one rank."""

    def __init__(
        self,
        dst: int,
        group: dist.ProcessGroup,
        watch: FailureWatch,
        to_host: Callable[[Any], torch.Tensor],
    ) -> None:
        """Starts the thread.

        Args:
            dst: Global rank of the destination.
            group: Process group of all ranks; others use it for collectives only.
            watch: Learns of a tensor that cannot be computed, and explains broken connections.
            to_host: Waits for a tensor and gives it in host memory.
        """
        self._to_host = to_host
        self._dst = dst
        self._group = group
        self._watch = watch
        self._queue: SimpleQueue[_Message | None] = SimpleQueue()
        self._num_sent = 0
        self._broken: BaseException | None = None
        self._is_orderly = True
        self.flushed = threading.Event()
        """Set when everything queued is delivered, after `finish`."""
        self.thread = threading.Thread(target=self._run, name=f"mpxla-send-{dst}", daemon=True)
        self.thread.start()

    def put(self, tensors: Sequence[torch.Tensor], channel: str) -> Handle[None]:
        """Queues one message of one or several tensors."""
        what = f"the delivery of a {channel!r} message to rank {self._dst}"
        handle: Handle[None] = Handle(self._watch, what, (self._dst,))
        self._queue.put(_Message(tensors, channel, handle))
        return handle

    def finish(self, *, is_orderly: bool) -> None:
        """Lets the thread end once everything queued is delivered.

        Args:
            is_orderly: Whether to tell the receiver that nothing follows.
        """
        self._is_orderly = is_orderly
        self._queue.put(None)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            self._deliver(message)
            del message  # its tensors are not needed while the thread waits for the next one
        self.flushed.set()
        if self._broken is None and self._is_orderly:
            try:
                self._send(_Envelope(True, self._num_sent, 0, b"", "", ""), None)
            except Exception as error:  # the peer is gone: it needs no farewell
                self._broken = error

    def _deliver(self, message: _Message) -> None:
        handle = message.handle
        if self._broken is not None:
            handle.set_error(self._broken)
            return
        try:
            tensors = [self._to_host(tensor) for tensor in message.tensors]
            specs, payload = layout(tensors), pack(tensors)
        except BaseException as error:  # the receiver waits for this message: it has to be told
            self._broken = error
            handle.set_error(error)
            self._watch.report(f"computing a {message.channel!r} message", error)
            return
        envelope = _Envelope(
            False, self._num_sent, payload.numel(), specs.digest, message.channel, specs.text
        )
        self._num_sent += 1
        try:
            self._send(envelope, payload)
        except Exception as error:  # whatever it is, the thread has to answer what comes later
            self._broken = self._watch.account_for(error, (self._dst,), handle.what)
            handle.set_error(self._broken)
        else:
            handle.set_result(None)

    def _send(self, envelope: _Envelope, payload: torch.Tensor | None) -> None:
        head = torch.frombuffer(bytearray(envelope.write()), dtype=torch.uint8)
        is_inline = envelope.num_bytes <= _INLINE_BYTES
        if payload is not None and is_inline:
            head = torch.cat([head, payload])
        works = [dist.isend(head, self._dst, self._group, _ENVELOPE_TAG)]
        if payload is not None and not is_inline:
            works.append(dist.isend(payload, self._dst, self._group, _PAYLOAD_TAG))
        for work in works:
            assert work is not None  # None is for ranks outside the group
            work.wait()


@dataclass(eq=False)
class Posted:
    """A receive that waits for its message."""

    handle: Handle[Any]
    layout: Layout | None
    """What the message must be; None takes anything."""
    unpack: Callable[[torch.Tensor], Any]
    """Makes the handle's result out of the payload."""

    @classmethod
    def make(cls, handle: Handle[Any], specs: Sequence[Spec] | None, is_bundle: bool) -> "Posted":
        """Prepares a receive.

        Args:
            handle: Completed by the message.
            specs: Expected tensors; None for raw bytes.
            is_bundle: Whether the result is a list.
        """
        if specs is None:
            return cls(handle, None, lambda payload: payload)
        if is_bundle:
            return cls(handle, layout(specs), lambda payload: unpack(payload, specs))
        return cls(handle, layout(specs), lambda payload: unpack(payload, specs)[0])


class Inbox:
    """Messages from one rank."""

    def __init__(self, src: int, group: dist.ProcessGroup, watch: FailureWatch) -> None:
        """Starts the thread.

        Args:
            src: Global rank of the source.
            group: As for the outbox.
            watch: Explains broken connections.
        """
        self._src = src
        self._group = group
        self._watch = watch
        self._lock = threading.Lock()
        self._posted: dict[str, deque[Posted]] = {}
        self._kept: dict[str, deque[tuple[_Envelope, torch.Tensor]]] = {}
        self._is_over = False
        self._over_error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name=f"mpxla-recv-{src}", daemon=True)
        self.thread.start()

    def post(self, posted: Posted, channel: str) -> None:
        """Has the next message of `channel` that no earlier receive takes complete a handle."""
        with self._lock:
            if kept := self._kept.get(channel):
                message = kept.popleft()
            elif self._is_over:
                message = None
            else:
                self._posted.setdefault(channel, deque()).append(posted)
                return
        if message is None:
            self._fail([posted])
        else:
            self._complete(posted, *message)

    def _run(self) -> None:
        try:
            self._take_in()
        except Exception as error:  # whoever waits, now or later, has to hear of it
            self._over_error = error
            if isinstance(error, MpxlaError):
                self._watch.report(f"reading messages of rank {self._src}", error)
        with self._lock:
            self._is_over = True
            abandoned = [posted for queue in self._posted.values() for posted in queue]
            self._posted.clear()
        self._fail(abandoned)

    def _take_in(self) -> None:
        """Reads messages until the last one."""
        ahead = self._expect_envelope()
        for number in itertools.count():
            work, data = ahead
            work.wait()
            envelope = self._open(data, number)
            if envelope.is_last:
                return
            ahead = self._expect_envelope()
            self._accept(envelope, self._receive_payload(envelope, data))

    def _open(self, data: torch.Tensor, number: int) -> _Envelope:
        """Reads an envelope.

        Raises:
            RankMismatch: it is none, or not the next one.
        """
        try:
            envelope = _Envelope.read(data)
            if envelope.number != number:
                raise RankMismatch(f"it has the number {envelope.number}")
            return envelope
        except Exception as error:
            raise RankMismatch(
                f"message {number} of rank {self._src} cannot be read: {error}. Install the same "
                f"version of mpxla on every host, and let nobody else communicate over its groups."
            ) from error

    def _expect_envelope(self) -> tuple[dist.Work, torch.Tensor]:
        data = torch.empty(_ENVELOPE.size + _INLINE_BYTES, dtype=torch.uint8)
        work = dist.irecv(data, self._src, self._group, _ENVELOPE_TAG)
        assert work is not None
        return work, data

    def _receive_payload(self, envelope: _Envelope, data: torch.Tensor) -> torch.Tensor:
        if envelope.num_bytes <= _INLINE_BYTES:
            view = data[_ENVELOPE.size : _ENVELOPE.size + envelope.num_bytes]
            return view.clone() if envelope.num_bytes < _CLONE_BYTES else view
        try:
            payload = torch.empty(envelope.num_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise MpxlaError(
                f"there is no memory for {envelope.num_bytes} bytes, {envelope.text}, on channel "
                f"{envelope.channel!r} from rank {self._src}."
            ) from error
        work = dist.irecv(payload, self._src, self._group, _PAYLOAD_TAG)
        assert work is not None
        work.wait()
        return payload

    def _accept(self, envelope: _Envelope, payload: torch.Tensor) -> None:
        with self._lock:
            waiting = self._posted.get(envelope.channel)
            if not waiting:
                self._kept.setdefault(envelope.channel, deque()).append((envelope, payload))
                return
            posted = waiting.popleft()
        self._complete(posted, envelope, payload)

    def _complete(self, posted: Posted, envelope: _Envelope, payload: torch.Tensor) -> None:
        expected = posted.layout
        if expected is None or expected.digest == envelope.digest:
            self._hand_over(posted, payload)
            return
        posted.handle.set_error(
            RankMismatch(
                f"rank {self._watch.rank} expected {expected.text} from rank {self._src} on "
                f"channel {envelope.channel!r}, but message {envelope.number} of that rank is "
                f"{envelope.text}. Run the same script with the same model and arguments on all "
                f"ranks."
            )
        )

    def _hand_over(self, posted: Posted, payload: torch.Tensor) -> None:
        try:
            value = posted.unpack(payload)
        except Exception as error:  # fewer bytes than its specs say
            wrong = RankMismatch(
                f"rank {self._watch.rank} cannot unpack {posted.handle.what}: {error}. Install the "
                f"same version of mpxla on every host."
            )
            posted.handle.set_error(wrong)
            self._watch.report("", wrong)
        else:
            posted.handle.set_result(value)

    def _fail(self, abandoned: list[Posted]) -> None:
        """Completes receives that no message will complete."""
        if not abandoned:
            return
        error = self._over_error
        for posted in abandoned:
            if error is None:
                self._watch.set_left(self._src)
                error = RuntimeError("it has closed its connections")
            posted.handle.set_error(
                self._watch.account_for(error, (self._src,), posted.handle.what)
            )


def interrupt(group: dist.ProcessGroup) -> None:
    """Makes all communication of a process group fail at once, in all threads of this process.

    A receive that times out closes all connections of its group; gloo has no other way.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                nothing = [torch.empty(1, dtype=torch.uint8)]
                group.recv(nothing, peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
