"""A process that has its imports already, and forks others which take the place of ones just started.

Starting torch takes a process seconds. A stand-in, `python -I -S zygote.py ADDRESS ARGUMENT...`,
takes milliseconds: it hands its arguments, environment, folder and descriptors to the zygote at
ADDRESS, which forks, and ends as that child ends. So whoever starts it, a launcher or an MPI's
`mpiexec`, has started the child. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import struct
import sys
from functools import partial
from typing import NoReturn

__all__ = ["end_as", "serve"]

_LENGTH = struct.Struct("I")
_MOST_FDS = 250
_ABOVE = 1 << 9
"""Where descriptors wait until those with their numbers are closed."""


def serve(listener: socket.socket) -> list[str]:
    """Fork a child for every stand-in that connects; end with standard input.

    Returns:
        In each child: its arguments, with everything else as the stand-in had it.
    """
    children: dict[socket.socket, int] = {}
    waiting = selectors.DefaultSelector()

    def stand_in_killed(link: socket.socket) -> None:
        if link in children:
            waiting.unregister(link)
            os.killpg(children[link], signal.SIGKILL)

    def child_ended(link: socket.socket, handle: int) -> None:
        waiting.unregister(handle)
        os.close(handle)
        with contextlib.suppress(KeyError):
            waiting.unregister(link)
        child = children.pop(link)
        os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        with link, contextlib.suppress(OSError):
            link.sendall(b"%d" % os.waitstatus_to_exitcode(status))

    waiting.register(0, selectors.EVENT_READ)
    waiting.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj == 0:
                for child in children.values():
                    os.killpg(child, signal.SIGKILL)
                sys.exit()
            if key.fileobj is not listener:
                key.data()
                continue
            link, _ = listener.accept()
            order, fds = _receive(link)
            if not order:
                link.close()  # killed before it had said all
                continue
            child = os.fork()
            if child == 0:
                waiting.close()
                for each in (listener, link, *children):
                    each.close()
                return _become(order, fds)
            os.setpgid(child, child)  # so that its own children end with it
            for fd in fds:
                os.close(fd)
            children[link] = child
            handle = os.pidfd_open(child)
            waiting.register(link, selectors.EVENT_READ, partial(stand_in_killed, link))
            waiting.register(handle, selectors.EVENT_READ, partial(child_ended, link, handle))


def _receive(link: socket.socket) -> tuple[bytes, list[int]]:
    with contextlib.suppress(OSError):
        head, fds, _, _ = socket.recv_fds(link, _LENGTH.size, _MOST_FDS)
        order, more = bytearray(), head
        while more and len(order) < _LENGTH.unpack(head)[0]:
            more = link.recv(1 << 16)
            order += more
        if more:
            return bytes(order), fds
        for fd in fds:
            os.close(fd)
    return b"", []


def _become(order: bytes, fds: list[int]) -> list[str]:
    """In the child: take over what the stand-in had."""
    arguments, variables, folder, numbers = json.loads(order)
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE) for fd in fds]
    os.closerange(0, _ABOVE)
    for fd, number in zip(kept, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    return [str(argument) for argument in arguments]


def _stand_in(address: str, arguments: list[str]) -> NoReturn:
    """Have the zygote fork a child in this process's place, and end as it ends."""
    numbers = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]
    with socket.socket(socket.AF_UNIX) as zygote:
        zygote.connect(address)
        order = json.dumps([arguments, dict(os.environ), os.getcwd(), numbers]).encode()
        socket.send_fds(zygote, [_LENGTH.pack(len(order))], numbers)
        zygote.sendall(order)
        # Whoever waits for the end of the child's output must not wait for this process.
        os.closerange(0, zygote.fileno())
        status = zygote.recv(16)
    end_as(int(status or 1))


def _is_open(number: int) -> bool:
    """Not so the one that the list of them was read from."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def end_as(code: int) -> NoReturn:
    """End like another process, so that the launcher sees what it always sees.

    Args:
        code: its exit status, or the negative of the signal that ended it.
    """
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    _stand_in(sys.argv[1], sys.argv[2:])
