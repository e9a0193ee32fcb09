"""`Link`: frames arrive whole and in order, whatever the socket does to the bytes."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdp._core.wire import Link, decode, encode


@pytest.fixture
def pair() -> Iterator[tuple[Link, Link]]:
    ends = socket.socketpair()
    links = Link(ends[0]), Link(ends[1])
    yield links
    for end in ends:
        end.close()


@given(st.lists(st.binary(max_size=300), max_size=20), st.lists(st.integers(1, 200), min_size=1))
def test_frames_survive_any_cut(payloads: list[bytes], cuts: list[int]) -> None:
    raw, end = socket.socketpair()
    with raw, end:
        link = Link(end)
        stream = b"".join(struct.pack("<I", len(payload)) + payload for payload in payloads)
        found: list[bytes] = []
        while stream:
            for cut in cuts:
                raw.sendall(stream[:cut])
                stream = stream[cut:]
                found += link.receive()
        assert found == payloads


def test_a_frame_is_not_given_out_before_its_last_byte() -> None:
    raw, end = socket.socketpair()
    with raw, end:
        link = Link(end)
        raw.sendall(struct.pack("<I", 5) + b"full")
        assert link.receive() == []
        raw.sendall(b"!" + struct.pack("<I", 0))
        assert link.receive() == [b"full!", b""]


def test_what_the_socket_does_not_take_waits_and_keeps_its_order(pair: tuple[Link, Link]) -> None:
    sender, receiver = pair
    payloads = [bytes([i]) * 100_000 for i in range(30)]
    for payload in payloads:
        sender.send(payload)
    assert sender.backlog, "3 MB fit into a socket buffer, so this test shows nothing"
    found = []
    while len(found) < len(payloads):
        found += receiver.receive()
        sender.flush()
    assert found == payloads
    assert not sender.backlog


def test_last_words_are_heard_before_the_end(pair: tuple[Link, Link]) -> None:
    sender, receiver = pair
    sender.send(b"one")
    sender.send(b"two")
    sender.close()
    assert receiver.receive() == [b"one", b"two"]
    with pytest.raises(ConnectionError, match="closed by the peer"):
        receiver.receive()


def test_a_peer_that_ends_in_mid_frame_is_gone() -> None:
    raw, end = socket.socketpair()
    with end:
        link = Link(end)
        raw.sendall(struct.pack("<I", 100) + b"half")
        raw.close()
        assert link.receive() == []
        with pytest.raises(ConnectionError):
            link.receive()


def test_sending_to_a_closed_peer_is_told(pair: tuple[Link, Link]) -> None:
    sender, receiver = pair
    receiver.close()
    with pytest.raises(ConnectionError):
        sender.send(b"nobody hears this")


def test_receive_one_waits_takes_one_and_leaves_the_rest() -> None:
    raw, end = socket.socketpair()
    with raw, end:
        link = Link(end)
        raw.sendall(struct.pack("<I", 3) + b"one" + struct.pack("<I", 3) + b"two")
        assert link.receive_one(time.monotonic() + 5) == b"one"
        assert link.receive_one(time.monotonic() + 5) == b"two"
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            link.receive_one(began + 0.05)
        assert time.monotonic() - began >= 0.05
    other, end = socket.socketpair()
    other.close()
    with end, pytest.raises(ConnectionError):
        Link(end).receive_one(time.monotonic() + 5)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_messages_come_back(message: object) -> None:
    payload = encode(b"S", message)
    assert payload[:1] == b"S"
    assert decode(payload) == message
