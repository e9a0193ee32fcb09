"""Data-loader workers beside a running engine: forked, spawned and from a fork server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvdp.testing import run_script

SCRIPT = """
import os, sys
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


def main(context):
    torch.set_num_threads(1)
    hvd.init()
    data = Data()
    layer = torch.nn.Linear(1, 1)
    hvd.broadcast_parameters(layer.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
    kept = {"num_workers": 2, "batch_size": 2, "multiprocessing_context": context}
    loader = DataLoader(data, sampler=hvd.shard(data), **kept)
    lasting = DataLoader(data, sampler=hvd.shard(data), persistent_workers=True, **kept)
    for loader in [loader, lasting] if context == "fork" else [lasting]:
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
    main(sys.argv[1])
"""


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers(context: str, tmp_path: Path) -> None:
    script = tmp_path / "loads.py"
    script.write_text(SCRIPT)
    done = run_script(
        [sys.executable, "-m", "hvdp.launch", "-np", "2", sys.executable, "-W", "error", script, context],
        timeout=90,
    )
    assert done.status == 0, done.stdout + done.stderr
    assert "rank 0 done" in done.stdout
    assert "rank 1 done" in done.stdout
