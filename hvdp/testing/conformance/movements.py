"""Cases in which values move and do not change."""

from __future__ import annotations

import hashlib
import time

import numpy as np

from hvdp._core.arrays import as_bytes
from hvdp._core.process_sets import Group
from hvdp._core.rendezvous import host_key
from hvdp.testing.conformance.checks import Checks, bytes_of

__all__ = ["Movements"]


class Movements(Checks):
    def broadcast(self) -> None:
        for root in range(self.group.size):
            for count in self.sizes(1):
                self.case = f"broadcast of {count} bytes from index {root}"
                self.broadcasted(self.group, root, count)

    def broadcasted(self, group: Group, root: int, count: int) -> None:
        whole, part = self.guarded(bytes_of(group.index, count))
        self.transport.broadcast(group, part, root)
        self.check_guards(whole)
        self.compare(part, bytes_of(root, count))

    def allgather(self) -> None:
        size = self.group.size
        beyond = 2 * max(self.thresholds) + 5
        for counts in (
            [0] * size,
            [8] * size,
            [3 * i for i in range(size)],
            [0] * (size - 1) + [5],
            [beyond if i == size // 2 else i for i in range(size)],
            [self.thresholds[0] + 1 - i for i in range(size)],
        ):
            self.case = f"allgather of {counts} bytes"
            self.gathered(self.group, counts)

    def gathered(self, group: Group, counts: list[int]) -> None:
        whole, out = self.guarded(np.zeros(sum(counts), np.uint8))
        self.transport.allgather(group, bytes_of(group.index, counts[group.index]), out, counts)
        self.check_guards(whole)
        self.compare(out, np.concatenate([bytes_of(i, count) for i, count in enumerate(counts)]))

    def alltoall(self) -> None:
        members = range(self.group.size)
        beyond = 2 * max(self.thresholds) + 5
        tables = [
            [[0 for _ in members] for _ in members],
            [[8 for _ in members] for _ in members],
            [[3 * i + j for j in members] for i in members],
            [
                [beyond if i == 0 and j == self.group.size - 1 else (i + j) % 2 for j in members]
                for i in members
            ],
            [[self.thresholds[0] // self.group.size + 1 - i for _ in members] for i in members],
        ]
        for counts in tables:
            self.case = f"alltoall of {counts} bytes"
            self.exchanged(self.group, counts)

    def exchanged(self, group: Group, counts: list[list[int]]) -> None:
        me, size = group.index, group.size
        data = np.concatenate([bytes_of(me * size + j, count) for j, count in enumerate(counts[me])])
        whole, out = self.guarded(np.zeros(sum(row[me] for row in counts), np.uint8))
        self.transport.alltoall(group, data, out, counts)
        self.check_guards(whole)
        self.compare(out, np.concatenate([bytes_of(i * size + me, row[me]) for i, row in enumerate(counts)]))

    def barrier(self) -> None:
        """Members of this host share a clock: none may leave before the last one has come."""
        host = int.from_bytes(hashlib.sha256(host_key().encode()).digest()[:6], "little")
        for late in range(self.group.size):
            self.case = f"barrier, index {late} comes late"
            if late == self.group.index:
                time.sleep(0.02)
            came = time.monotonic_ns()
            self.transport.barrier(self.group)
            mine = np.array([host, came, time.monotonic_ns()], np.int64)
            everyone = np.empty(3 * self.group.size, np.int64)
            self.transport.allgather(self.group, as_bytes(mine), as_bytes(everyone), [24] * self.group.size)
            here = everyone.reshape(-1, 3)[everyone[::3] == host]
            if here[:, 1].max() > here[:, 2].min():
                self.fault(f"a rank left {here[:, 1].max() - here[:, 2].min()} ns before the last one came")
