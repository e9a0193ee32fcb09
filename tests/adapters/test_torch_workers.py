"""Data-loader workers beside a running engine: forked, spawned and from a fork server."""

from __future__ import annotations

import sys
from pathlib import Path

from hvdp.testing import run_script

SCRIPT = """
import os
import torch
from torch.utils.data import DataLoader, Dataset
import hvdp.torch as hvd
from hvdp.errors import NotInitializedError


class Data(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        try:
            hvd.allreduce(torch.ones(1))
        except NotInitializedError as error:
            text = str(error)
        else:
            text = "a worker took part in a collective"
        return index, os.getpid(), text


def main():
    torch.set_num_threads(1)
    hvd.init()
    data = Data()
    layer = torch.nn.Linear(1, 1)
    hvd.broadcast_parameters(layer.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
    for context, workers, persistent in (
        ("fork", 2, False), ("fork", 2, True), ("forkserver", 2, True), ("spawn", 1, True)
    ):
        loader = DataLoader(
            data, batch_size=2, sampler=hvd.shard(data), num_workers=workers,
            multiprocessing_context=context, persistent_workers=persistent,
        )
        for epoch in range(3):
            seen = []
            for indices, processes, texts in loader:
                assert os.getpid() not in processes.tolist()
                wrong = "hvdp is not initialised: call hvd.init() before hvd.allreduce()."
                assert set(texts) == {wrong}, texts
                optimizer.zero_grad()
                layer(indices[:, None].float()).mean().backward()
                optimizer.step()
                seen += indices.tolist()
            assert sorted(sum(hvd.allgather_object(seen), [])) == list(range(12))
    hvd.check_consistency(layer, optimizer)
    print("rank", hvd.rank(), "done")
    hvd.shutdown()


if __name__ == "__main__":
    main()
"""


def test_workers(tmp_path: Path) -> None:
    script = tmp_path / "loads.py"
    script.write_text(SCRIPT)
    done = run_script(
        [sys.executable, "-m", "hvdp.launch", "-np", "2", sys.executable, "-W", "error", script], timeout=100
    )
    assert done.status == 0, done.stdout + done.stderr
    assert "rank 0 done" in done.stdout
    assert "rank 1 done" in done.stdout
