"""How the ranks of a job find, trust and count each other.

Rank 0 listens; every other rank connects and says who it is. Both sides prove that they
know the job's secret (HMAC-SHA256 over the other's random challenge); on a Unix socket the
kernel also vouches that the peer runs as the same user. Rank 0 then tells everyone who is
on which host and which transport to use, or why the job cannot start.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdp import errors
from hvdp._core.topology import Place, Topology
from hvdp._core.wire import Link, decode, encode
from hvdp.errors import HvdpError, RendezvousError

__all__ = ["Listener", "Meeting", "host_key", "meet"]

_RETRY_SECONDS = 0.02
_STRANGER_SECONDS = 10.0
_UCRED = struct.Struct("3i")


@dataclass(frozen=True)
class Meeting:
    """The outcome: `links` has every other rank on rank 0, and only rank 0 elsewhere."""

    topology: Topology
    links: dict[int, Link]
    transport: str


def host_key() -> str:
    """Equal for two processes if, and only if, they can share memory and abstract sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


class Listener:
    """Rank 0's end of an address; bound at once, so that its port is known before it is told."""

    def __init__(self, address: str) -> None:
        scheme, _, rest = address.partition(":")
        if scheme == "unix":
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            target: Any = f"\0{rest}"
        else:
            self.sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            target = ("", int(rest.rpartition(":")[2]))
        try:
            self.sock.bind(target)
        except OSError as error:
            self.sock.close()
            raise RendezvousError(
                f"rank 0 cannot listen at {address}: {error}. Is another job using this address?"
            ) from error
        self.sock.listen(1024)

    @property
    def port(self) -> int:
        return int(self.sock.getsockname()[1])

    def close(self) -> None:
        self.sock.close()


def meet(
    place: Place,
    facts: dict[str, Any],
    agree: Callable[[Topology, list[dict[str, Any]]], str],
    timeout: float,
    generation: int,
    listener: Listener | None = None,
) -> Meeting:
    """Meet the other ranks; called once by every rank for each `init`.

    Args:
        facts: what rank 0 must know about this process.
        agree: on rank 0, chooses the transport from all ranks' facts, or raises HvdpError,
            which then every rank raises alike.
        timeout: seconds until a missing rank is an error.
        generation: how often this process has met before; keeps two `init`s apart.
        listener: rank 0's socket where it had to be bound beforehand.

    Raises:
        RendezvousError: a rank is missing, is not trusted, or the ranks do not fit together.
    """
    if place.size == 1:
        topology = Topology(0, (0,))
        return Meeting(topology, {}, agree(topology, [facts]))
    deadline = time.monotonic() + timeout
    address = f"{place.address}#{generation}" if place.address.startswith("unix:") else place.address
    me = {"rank": place.rank, "size": place.size, "host": host_key(), "facts": facts}
    if place.rank == 0:
        return _lead(place, me, agree, deadline, listener or Listener(address))
    return _follow(place, me, deadline, address)


def _lead(
    place: Place,
    me: dict[str, Any],
    agree: Callable[[Topology, list[dict[str, Any]]], str],
    deadline: float,
    listener: Listener,
) -> Meeting:
    links: dict[int, Link] = {}
    hellos = {0: me}
    try:
        while len(hellos) < place.size:
            link, hello = _accept(listener, place, deadline, hellos)
            rank = hello["rank"]
            if hello["size"] != place.size or not 0 < rank < place.size or rank in hellos:
                links[-1 - len(links)] = link
                raise RendezvousError(
                    f"a process came as rank {rank} of {hello['size']} to a job of {place.size} ranks "
                    f"that has ranks {sorted(hellos)} already. Start all ranks with one launcher command."
                )
            hellos[rank], links[rank] = hello, link
        ordered = [hellos[rank] for rank in range(place.size)]
        keys: dict[str, int] = {}
        hosts = tuple(keys.setdefault(hello["host"], len(keys)) for hello in ordered)
        topology = Topology(0, hosts)
        transport = agree(topology, [hello["facts"] for hello in ordered])
        for rank, link in links.items():
            _welcome(rank, link, {"hosts": hosts, "transport": transport})
    except HvdpError as error:
        for link in links.values():
            with contextlib.suppress(ConnectionError):
                link.send(encode(b"R", [type(error).__name__, str(error)]))
            link.close()
        raise
    finally:
        listener.close()
    return Meeting(topology, links, transport)


def _welcome(rank: int, link: Link, message: dict[str, Any]) -> None:
    try:
        link.send(encode(b"W", message))
    except ConnectionError as error:
        raise RendezvousError(f"rank {rank} died before the job had begun") from error


def _accept(
    listener: Listener, place: Place, deadline: float, present: dict[int, Any]
) -> tuple[Link, dict[str, Any]]:
    """The next process that proves to belong to the job; others are turned away."""
    while True:
        listener.sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            sock, _ = listener.sock.accept()
        except TimeoutError:
            missing = [rank for rank in range(place.size) if rank not in present]
            raise RendezvousError(
                f"rank 0 waited in vain for ranks {missing} of {place.size} (started by {place.launcher}). "
                "Did they call hvd.init()? Raise HOROVOD_START_TIMEOUT (seconds) if they need longer."
            ) from None
        link = Link(sock)
        try:
            if not _same_user(sock):
                raise ConnectionError("another user")
            patience = min(deadline, time.monotonic() + _STRANGER_SECONDS)
            _challenge(link, place.secret, b"rank", patience)
            _answer(link, place.secret, b"lead", patience)
            hello: dict[str, Any] = decode(link.receive_one(patience))
        except (OSError, ValueError):
            link.close()
            continue
        return link, hello


def _follow(place: Place, me: dict[str, Any], deadline: float, address: str) -> Meeting:
    while True:
        link = _connect(address)
        if link is not None:
            try:
                _answer(link, place.secret, b"rank", deadline)
                _challenge(link, place.secret, b"lead", deadline)
                link.send(encode(b"H", me))
                reply = link.receive_one(deadline)
            except TimeoutError:
                link.close()
            except ConnectionError as error:
                link.close()
                raise RendezvousError(
                    f"rank {place.rank} reached rank 0 at {address} but was turned away ({error}). "
                    "Ranks of one job share HVDP_SECRET and user."
                ) from error
            else:
                break
        if time.monotonic() >= deadline:
            raise RendezvousError(
                f"rank {place.rank} did not find rank 0 at {address} in time. Has rank 0 called hvd.init()? "
                "Raise HOROVOD_START_TIMEOUT (seconds) if it needs longer."
            )
        time.sleep(_RETRY_SECONDS)
    answer = decode(reply)
    if reply[:1] == b"R":
        link.close()
        kind, text = answer
        raise getattr(errors, kind)(text)
    topology = Topology(place.rank, tuple(answer["hosts"]))
    return Meeting(topology, {0: link}, answer["transport"])


def _connect(address: str) -> Link | None:
    """Connect to one of the address's hosts; None while nobody listens there."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(f"\0{rest}")
        except OSError:
            sock.close()
            return None
        if not _same_user(sock):
            sock.close()
            raise RendezvousError(f"another user listens at {address}; start the job again")
        return Link(sock)
    hosts, _, port = rest.rpartition(":")
    for host in hosts.split(","):
        with contextlib.suppress(OSError):
            return Link(socket.create_connection((host, int(port)), timeout=2))
    return None


def _same_user(sock: socket.socket) -> bool:
    if sock.family != socket.AF_UNIX:
        return True
    _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return bool(uid == os.getuid())


def _challenge(link: Link, secret: bytes, role: bytes, deadline: float) -> None:
    nonce = secrets.token_bytes(32)
    link.send(nonce)
    answer = link.receive_one(deadline)
    if not hmac.compare_digest(answer, _proof(secret, role, nonce)):
        raise ConnectionError("a wrong secret")


def _answer(link: Link, secret: bytes, role: bytes, deadline: float) -> None:
    link.send(_proof(secret, role, link.receive_one(deadline)))


def _proof(secret: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, role + nonce, hashlib.sha256).digest()
