"""Waits for a part's messages, and raises if they do not come."""

from __future__ import annotations

import contextlib
import functools
import queue
import time
from collections.abc import Callable, Iterable

from fastps.errors import DeadlineError
from fastps.torch.parallel.errors import decode, encode, lost, quoted
from fastps.torch.parallel.links.links import Links, Lost
from fastps.torch.parallel.links.messages import Kind, Message
from fastps.torch.parallel.plan import Plan

__all__ = ["Key", "Mailbox"]

#: Call, kind, number, micro-batch.
Key = tuple[int, Kind, int, int]
#: Seconds in which a part that is not stopped answers what it waits for.
_PATIENCE = 1.0


class Mailbox:
    """The messages of one part.

    Args:
        plan: For the names of other parts' nodes.
        part: The part.
        links: Its connections.
        timeout: Seconds to wait for a message.

    Attributes:
        arrived: Messages that were not waited for yet.
        waiting: Seconds in which the part waited.
        check: Called with each message that comes; may raise.
    """

    def __init__(self, plan: Plan, part: int, links: Links, timeout: float) -> None:
        self.arrived: dict[Key, Message] = {}
        self.waiting = 0.0
        self.check: Callable[[Message], None] = lambda message: None  # noqa: ARG005
        self._plan, self._part, self._links, self._timeout = plan, part, links, timeout
        #: Parts that have closed; those that still wait for others are not concerned.
        self._closed: set[int] = set()

    def tell(self, message: Message, parts: Iterable[int] | None = None) -> None:
        """Sends a message to some parts, or to all others."""
        for part in range(self._plan.parts) if parts is None else parts:
            if part != self._part:
                self._links.send(part, message)

    def fail(self, error: BaseException) -> None:
        """Tells all other parts why this one takes no further step."""
        self.tell(Message(Kind.ERROR, tensor=encode(error, self._part)))

    def settle(self) -> None:
        """Frees the memory of what was sent; see `Links.settle`."""
        self._links.settle()

    def wait(self, key: Key, source: int, what: str, step: int = 0, patient: bool = False) -> Message:
        """Waits for one message and keeps all others for later.

        Args:
            key: Of the message.
            source: The part that sends it.
            what: Description of the message, for error texts.
            step: Training step, for error texts.
            patient: Wait without a deadline.

        Raises:
            ConnectionLostError: A part is gone, this one or another.
            DeadlineError: It did not come in time.
            FastpsError: Another part has failed.
        """
        begun = time.perf_counter()
        waiting = functools.partial(self._waiting, what, source, step)
        self._links.waits_for = source
        if key not in self.arrived and source in self._closed:
            raise lost(source, self._nodes(source), waiting())
        while key not in self.arrived:
            left = None if patient else max(0.0, begun + self._timeout - time.perf_counter())
            try:
                found = self._links.inbox.get(timeout=left)
            except queue.Empty:
                raise self._late(source, f"{waiting()} for {self._timeout} s") from None
            self._take(found, source, waiting)
        self._links.waits_for = -1
        self.waiting += time.perf_counter() - begun
        return self.arrived.pop(key)

    def poll(self, step: int) -> None:
        """Takes what has come, without waiting; raises as `wait` if a part is gone or has failed."""
        with contextlib.suppress(queue.Empty):
            while True:
                found = self._links.inbox.get_nowait()
                self._take(found, -1, lambda: f"part {self._part} was at step {step}")

    def _waiting(self, what: str, source: int, step: int) -> str:
        return f"part {self._part} waited for {what}, step {step}, from part {source}"

    def _take(self, found: Message | Lost, source: int, waiting: Callable[[], str]) -> None:
        if isinstance(found, Lost):
            raise lost(found.part, self._nodes(found.part), waiting())
        if found.kind is Kind.ERROR:
            assert found.tensor is not None
            raise decode(found.tensor)
        if found.kind is Kind.CLOSE:
            self._closed.add(found.source)
        if source in self._closed:
            raise lost(source, self._nodes(source), waiting())
        self.check(found)
        index = found.source if found.kind is Kind.ANSWER else found.micro_batch
        self.arrived[found.call, found.kind, found.number, index] = found

    def _late(self, source: int, waiting: str) -> DeadlineError:
        """Asks the part that a message is due from whether it waits for another one, and that one in turn."""
        asked, state = {self._part}, "waits in a cycle"
        while source not in asked:
            asked.add(source)
            following = self._ask(source, waiting)
            if following is None or following < 0:
                state = "does not answer" if following is None else "is still computing"
                break
            source = following
        return DeadlineError(
            f"part {source} of the replica {state} (nodes {quoted(self._nodes(source))}): {waiting}; start "
            "the replica again, or give it a longer timeout"
        )

    def _ask(self, part: int, waiting: str) -> int | None:
        """The part that a part waits for, -1 if it waits for none, None if it does not answer."""
        self.tell(Message(Kind.ASK), [part])
        key, end = (0, Kind.ANSWER, 0, part), time.perf_counter() + _PATIENCE
        while key not in self.arrived and time.perf_counter() < end:
            with contextlib.suppress(queue.Empty):
                self._take(self._links.inbox.get(timeout=_PATIENCE / 10), part, lambda: waiting)
        return self.arrived.pop(key).rows if key in self.arrived else None

    def _nodes(self, part: int) -> list[str]:
        return [node.name for node in self._plan.nodes_of([part])]
