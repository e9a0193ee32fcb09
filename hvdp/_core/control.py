"""One rank's side of the control plane: links, the coordinator on rank 0, and what goes over them.

One thread at a time drives it; others may only sleep, watch, wake and ring.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from itertools import groupby
from typing import Any

from hvdp._core import messages
from hvdp._core.coordinator import Coordinator, Submission, Verdict
from hvdp._core.messages import Notice
from hvdp._core.offers import MOST_NUMBERS, Offers
from hvdp._core.ops import Signature
from hvdp._core.rendezvous import Meeting
from hvdp._core.wire import Link, decode, encode
from hvdp.errors import HorovodInternalError

__all__ = ["ControlPlane"]

_SKIPPED_OFFERS = 10
"""After one in vain: rank 0 may be busy in another way for some time, and does not hear offers."""


class ControlPlane:
    """Sends submissions to rank 0 and hands the verdicts to `deliver`, frame by frame.

    Args:
        deliver: called with the notices of one frame, which all members get alike.
        departed: called on the members when rank 0 has left.
        traced: called with a rank and what its `trace` sent.
        board: memory for `Offers`, or None as long as there is none.
    """

    def __init__(
        self,
        meeting: Meeting,
        cache_capacity: int,
        deliver: Callable[[list[Notice]], None],
        departed: Callable[[int, str], None],
        traced: Callable[[int, Any], None],
        board: Callable[[], memoryview | None],
    ) -> None:
        self._deliver = deliver
        self._departed = departed
        self._traced = traced
        self._rank = meeting.topology.rank
        self._board = board
        self._offers: Offers | None = None
        self._offers_to_skip = 0
        self._links = dict(meeting.links)
        self.coordinator: Coordinator | None = None
        if meeting.topology.rank == 0:
            self.coordinator = Coordinator(meeting.topology.size, cache_capacity)
        self._verdicts: list[Verdict] = []
        self._leaving: list[int] = []
        self._let_go = False
        self._said_goodbye = False
        self._numbers: dict[Signature, int] = {}
        self._signatures: dict[int, Signature] = {}
        self._known = bytearray(b"s")
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ring_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._words = select.epoll()
        self._ranks = {link.fileno(): rank for rank, link in self._links.items()}
        for fd in self._ranks:
            self._words.register(fd, select.EPOLLIN)
        self._backlogged: set[int] = set()
        self._sleeper = select.epoll()
        self._sleeper.register(self._wake_fd, select.EPOLLIN)
        self._sleeper.register(self._words, select.EPOLLIN)
        self._watcher = select.epoll()
        self._watcher.register(self._ring_fd, select.EPOLLIN)
        self._watcher.register(self._words, select.EPOLLIN)

    def wake(self) -> None:
        """End a `sleep`. The caller sees to it that `close` does not run meanwhile."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def sleep(self, timeout: float | None) -> None:
        """The background thread waits for a word, a `wake`, or so many seconds; takes nothing."""
        self._sleeper.poll(timeout)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def ring(self) -> None:
        """End another thread's `watch`, also one that is yet to come."""
        os.eventfd_write(self._ring_fd, 1)

    def let_sleep(self, asleep: bool) -> None:
        """Whether words leave the background thread asleep, because a caller watches for them."""
        self._sleeper.modify(self._words, 0 if asleep else select.EPOLLIN)

    def watch(self, timeout: float | None) -> bool:
        """A caller waits for a word, a `ring`, or so many seconds. Whether one came.

        Takes the ring, and no word: one caller watches at a time, so it is nobody else's.
        """
        came = self._watcher.poll(timeout)
        if any(fd == self._ring_fd for fd, _ in came):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._ring_fd)
        return bool(came)

    def listen(self, timeout: float) -> None:
        """Wait up to so many seconds for a word, and take what came.

        Raises:
            HorovodInternalError: a rank has died, or told us that the job failed.
        """
        for fd, _ in self._words.poll(timeout):
            if fd in self._ranks:
                self._hear(self._ranks[fd])

    def submit(self, submission: Submission) -> None:
        """Sent with the next `flush`, together with others."""
        if self.coordinator is not None:
            self._verdicts += self.coordinator.submit(0, submission)
            return
        number = self._numbers.get(submission.signature, -1)
        if number >= 0 and not submission.error:
            self._known += messages.pack_known(number, submission.extras)
        else:
            self._flush_known()
            self._send(0, messages.submission_frame(submission))

    def agree_at_once(self, submission: Submission, seconds: float) -> bool:
        """Submit the one operation in flight here; whether all ranks came to it within so many seconds.

        Otherwise it has been submitted like any other. A word that comes meanwhile ends the waiting.
        """
        number = self._numbers.get(submission.signature, -1)
        offers = self._shared_offers()
        if offers is not None and 0 <= number < MOST_NUMBERS and not (submission.extras or submission.error):
            until = time.perf_counter() + seconds

            def give_up() -> bool:
                return self._distracted(until)

            if self.coordinator is not None and self.coordinator.untouched(submission.signature):
                told = [self._links[rank].told for rank in sorted(self._links)]
                if offers.answer(number, told, give_up):
                    return True
            elif self.coordinator is None and not self._offers_to_skip:
                withdrawn = offers.ask(number, self._links[0].heard, give_up)
                if withdrawn:
                    self._offers_to_skip = _SKIPPED_OFFERS
                    self._send(0, messages.withdrawn_frame(withdrawn, number))
                return not withdrawn
        self._offers_to_skip = max(0, self._offers_to_skip - 1)
        self.submit(submission)
        return False

    def flush(self) -> None:
        """Send everything that waits, and deliver rank 0's own verdicts."""
        self._flush_known()
        for rank in list(self._backlogged):
            self._send(rank, None)
        # A word that is heard while sending may lead to more.
        while self._verdicts or self._leaving:
            verdicts, self._verdicts = self._verdicts, []
            leaving, self._leaving = self._leaving, []
            for members, run in groupby(verdicts, key=lambda verdict: verdict.members):
                self._announce(members, messages.verdict_frame(list(run)))
            # After all that these have to take part in.
            for rank in leaving:
                self._send(rank, b"g")

    def goodbye(self, reason: str) -> bool:
        """Say that this rank leaves, the first time; whether it may go.

        Rank 0 may at once, and the others when it has told them all that they still take part in.
        """
        if not self._said_goodbye:
            self._said_goodbye = True
            self._last_word(encode(b"G", reason))
        if self._let_go:
            self._last_word(b"g")
        return self.coordinator is not None or self._let_go or not self._links

    def abort(self, rank: int, text: str) -> None:
        """Tell everybody that the job has failed, and who failed first."""
        self._last_word(encode(b"A", [rank, text]))

    def trace(self, message: Any) -> None:
        """Something about the timeline: from rank 0 to all, from the others to rank 0."""
        for peer in list(self._links):
            self._send(peer, encode(b"T", message))

    def close(self) -> None:
        for poll in (self._sleeper, self._watcher, self._words):
            poll.close()
        for link in self._links.values():
            link.close()
        os.close(self._wake_fd)
        os.close(self._ring_fd)
        self._wake_fd = -1

    def abandon(self) -> None:
        """In a forked child: close the descriptors without a word to the peers."""
        for poll in (self._sleeper, self._watcher, self._words):
            poll.close()
        for link in self._links.values():
            link.sock.close()

    def _announce(self, members: tuple[int, ...], frame: bytes) -> None:
        for member in members:
            if member != 0:
                self._send(member, frame)
        if 0 in members:
            self._take_verdicts(frame)

    def _hear(self, peer: int) -> None:
        try:
            frames = self._links[peer].receive()
        except ConnectionError:
            # Closed without a goodbye.
            self._drop(peer)
            text = f"rank {peer} died: its process ended without leaving the job"
            raise HorovodInternalError(text, peer) from None
        for frame in frames:
            self._take(peer, frame)

    def _take(self, peer: int, frame: bytes) -> None:
        tag = frame[:1]
        if tag in b"sS" and self.coordinator is not None:
            for submission in messages.read_submission(frame, self.coordinator.signature):
                self._verdicts += self.coordinator.submit(peer, submission)
        elif tag == b"w" and self.coordinator is not None:
            self._take_withdrawn(peer, *messages.read_withdrawn(frame))
        elif tag in b"vV":
            self._take_verdicts(frame)
        elif tag == b"G" and self.coordinator is not None:
            self._verdicts += self.coordinator.leave(peer, decode(frame))
            self._leaving.append(peer)
        elif tag == b"G":
            self._drop(peer)
            self._departed(peer, decode(frame))
        elif tag == b"g" and self.coordinator is not None:
            self._drop(peer)
        elif tag == b"g":
            self._let_go = True
        elif tag == b"T":
            self._traced(peer, decode(frame))
        elif tag == b"A":
            rank, text = decode(frame)
            raise HorovodInternalError(text, rank)

    def _take_verdicts(self, frame: bytes) -> None:
        notices = messages.read_verdicts(frame, self._signatures.__getitem__)
        for notice in notices:
            if notice.number >= 0 and notice.number not in self._signatures:
                self._numbers[notice.signature] = notice.number
                self._signatures[notice.number] = notice.signature
        self._deliver(notices)

    def _take_withdrawn(self, peer: int, agreement: int, number: int) -> None:
        """Withdrawn in time, an offer is a submission; otherwise the others are at the operation already."""
        assert self.coordinator is not None
        offers = self._shared_offers()
        if offers is not None and agreement <= offers.agreements:
            self._send(peer, b"v" + messages.pack_known(number, ()))
        else:
            submission = Submission(self.coordinator.signature(number))
            self._verdicts += self.coordinator.submit(peer, submission)

    def _shared_offers(self) -> Offers | None:
        if self._offers is None and (words := self._board()) is not None:
            self._offers = Offers(words, self._rank)
        return self._offers

    def _distracted(self, until: float) -> bool:
        """Whether a word has come, or it has become late."""
        return bool(self._words.poll(0)) or time.perf_counter() >= until

    def _flush_known(self) -> None:
        if len(self._known) > 1:
            self._send(0, bytes(self._known))
            del self._known[1:]

    def _send(self, peer: int, frame: bytes | None) -> None:
        """Send a frame, or what is left of earlier ones; nothing to a rank that has left."""
        link = self._links.get(peer)
        if link is None:
            return
        try:
            if frame is None:
                link.flush()
            else:
                link.send(frame)
            self._watch(peer, link)
        except ConnectionError:
            # What the peer said last is still to be read, and tells why.
            self._hear(peer)

    def _watch(self, rank: int, link: Link) -> None:
        """Be told when a link takes more, as long as something waits for it."""
        if link.backlog != (rank in self._backlogged):
            self._backlogged ^= {rank}
            self._words.modify(link, select.EPOLLIN | (select.EPOLLOUT if link.backlog else 0))

    def _drop(self, peer: int) -> None:
        link = self._links.pop(peer)
        self._words.unregister(link)
        self._backlogged.discard(peer)
        del self._ranks[link.fileno()]
        link.close()

    def _last_word(self, frame: bytes) -> None:
        for link in self._links.values():
            with contextlib.suppress(ConnectionError):
                link.send(frame)
