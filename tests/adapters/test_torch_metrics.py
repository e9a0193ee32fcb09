"""Metrics of all ranks' samples are those of one process, also with padding and torchmetrics."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import hvdp.torch as hvd
from hvdp.errors import InvalidArgumentError, MismatchError
from hvdp.testing import World, worlds


def _start() -> tuple[int, int]:
    torch.set_num_threads(1)
    hvd.init()
    warnings.simplefilter("error")
    return hvd.rank(), hvd.size()


def nine_samples() -> None:
    """Means of nine, however they are divided."""
    _start()
    values = torch.arange(9, dtype=torch.float32).square().requires_grad_()
    wanted = float(values.detach().double().mean())
    uneven, padded, batches = hvd.metrics.Mean(), hvd.metrics.Mean(), hvd.metrics.Mean()
    uneven.update(values[list(hvd.shard(9, pad=False))])
    assert uneven.compute() == wanted
    share = hvd.shard(9, seed=4)
    loader = torch.utils.data.DataLoader(torch.arange(9), batch_size=2, sampler=share)
    for _ in range(2):
        padded.reset()
        batches.reset()
        for start, batch in zip(range(0, len(share), 2), loader, strict=True):
            counts = ~share.is_padding[start : start + 2]
            padded.update(values[batch], weight=counts)
            if counts.any():
                batches.update(values[batch][counts].mean(), weight=counts.sum())
        assert padded.compute() == wanted
        assert batches.compute() == pytest.approx(wanted)


def accuracies() -> None:
    rank, size = _start()
    scores = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(11) % 4
    wanted = (scores.argmax(1) == labels).double().mean()
    accuracy, total = hvd.metrics.Accuracy(), hvd.metrics.Sum()
    accuracy.update(hvd.shard(scores, pad=False).bfloat16(), hvd.shard(labels, pad=False))
    total.update(hvd.shard(labels, pad=False))
    assert accuracy.compute() == pytest.approx(float(wanted))
    assert total.compute() == labels.sum()
    nothing = hvd.metrics.MeanSquaredError()
    if rank == size - 1:
        nothing.update([1.0], [3.0])
    assert nothing.compute() == 4.0
    members = hvd.ProcessSet([0])
    hvd.add_process_set(members)
    if rank == 0:
        alone = hvd.metrics.Mean(process_set=members)
        alone.update(2.0)
        assert alone.compute() == 2.0


def two_classes() -> None:
    _start()
    labels = torch.tensor([1, 0, 1, 1])
    chances = torch.tensor([0.9, 0.2, 0.3, 0.6])
    for scores, threshold in ((chances, 0.5), (chances[:, None], 0.5), (torch.logit(chances), 0.0)):
        accuracy = hvd.metrics.Accuracy(threshold=threshold)
        accuracy.update(scores, labels)
        assert accuracy.compute() == 0.75
        with pytest.raises(InvalidArgumentError, match=r"threshold=0\.5"):
            hvd.metrics.Accuracy().update(scores, labels)
    whole = hvd.metrics.Accuracy()
    whole.update(torch.tensor([1.0, 0.0, float("nan"), 1.0]), labels, weight=labels * 0 + 1)
    assert whole.compute() == 0.75
    with pytest.raises(InvalidArgumentError, match="one shape"):
        hvd.metrics.Accuracy(threshold=0.5).update(torch.zeros(4, 2), labels)


def in_another_order() -> None:
    rank, _ = _start()
    loss, accuracy = hvd.metrics.Mean(), hvd.metrics.Accuracy()
    loss.update(3.0)
    accuracy.update([1], [1])
    for metric in (loss, accuracy) if rank else (accuracy, loss):
        with pytest.raises(MismatchError, match=r"rank 0 has \w+ \d+, rank 1 has \w+ \d+") as caught:
            metric.compute()
        assert {"Mean", "Accuracy"} <= set(str(caught.value).split())
    assert (loss.compute(), accuracy.compute()) == (3.0, 1.0)


class Metric(torch.nn.Module):
    """What hvdp touches of torchmetrics.Metric, for where that is not installed."""

    def __init__(self) -> None:
        super().__init__()
        self.dist_sync_fn: Any = None
        self.distributed_available_fn: Any = None
        self.total, self.seen = torch.zeros(()), [torch.zeros(0)]

    def update(self, values: torch.Tensor) -> None:
        self.total = self.total + values.sum()
        self.seen.append(values)

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        total, seen = self.total, torch.cat(self.seen)
        if self.distributed_available_fn():
            total = torch.stack(self.dist_sync_fn(total, group=None)).sum()
            seen = torch.cat(self.dist_sync_fn(seen, group=None))
        return total, seen


def stand_in() -> None:
    rank, size = _start()
    metric = hvd.metrics.synced(torch.nn.ModuleList([Metric()]))[0]
    if rank != 1:
        metric.update(torch.full((rank + 1,), 2, dtype=torch.int64))
    for _ in range(2):
        total, seen = metric.compute()
        count = sum(r + 1 for r in range(size) if r != 1)
        assert total == 2 * count
        assert seen.tolist() == [2] * count
    with pytest.raises(ValueError, match="Received: Linear"):
        hvd.metrics.synced(torch.nn.Linear(1, 1))


def real() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchmetrics
    rank, size = _start()
    warnings.simplefilter("ignore")  # torchmetrics' own, where a rank has had no data
    scores = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(11) % 4
    own = slice(rank, None, size)

    def build() -> Any:
        return torchmetrics.MetricCollection(
            {
                "accuracy": torchmetrics.classification.MulticlassAccuracy(4),
                "auroc": torchmetrics.classification.MulticlassAUROC(4),
            }
        )

    pairs = [
        (build(), build(), (scores, labels)),
        (torchmetrics.MeanMetric(), torchmetrics.MeanMetric(), (scores[:, 0],)),
        (torchmetrics.MaxMetric(), torchmetrics.MaxMetric(), (scores[:, 1],)),
        (torchmetrics.CatMetric(), torchmetrics.CatMetric(), (labels,)),
    ]
    for alone, ours, data in pairs:
        hvd.metrics.synced(ours)
        alone.update(*data)
        if rank == 0 or data[0] is not labels:
            ours.update(*(part[own] if data[0] is not labels else part for part in data))
        for _ in range(2):
            torch.testing.assert_close(ours.compute(), alone.compute(), check_dtype=False)


def _run_all() -> None:
    nine_samples()
    accuracies()
    two_classes()
    in_another_order()
    stand_in()
    real()


@pytest.mark.parametrize("world", worlds(shm=(2, 3)), ids=str)
def test_metrics(world: World) -> None:
    world.run(_run_all)
