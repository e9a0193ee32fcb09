"""Optimizers, and options of DistributedOptimizer: cases of `test_torch_habits`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hvdp.torch as hvd

from .ways import BATCH, STEPS, Way, batches, equal_everywhere, mlp, plain_loop, same, sgd


def every_optimizer() -> None:
    special = {
        "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
        "Muon": lambda p: torch.optim.Muon(p, lr=0.1),
    }
    names = [name for name in dir(torch.optim) if _is_optimizer(getattr(torch.optim, name))]
    assert len(names) >= 13
    for name in names:
        if name == "SparseAdam":
            same(lambda way: sparse_loop(way, torch.optim.SparseAdam, 0.05))
            continue
        make = special.get(name, getattr(torch.optim, name))
        bias = name != "Muon"  # which takes matrices only
        tolerance = 1e-3 if name == "Muon" else 1e-7  # Muon computes in bfloat16

        def train(
            way: Way, make: Any = make, bias: bool = bias, tolerance: float = tolerance
        ) -> list[Tensor]:
            model = mlp(bias)
            optimizer = way.wrap(make(model.parameters()), named_parameters=model.named_parameters())
            found = plain_loop(way, model, optimizer)
            for old, parameter in zip(mlp(bias).parameters(), found, strict=True):
                assert (parameter - old).abs().max() > 100 * tolerance, f"{make} hardly moves"
            return found

        same(train, tolerance)


def _is_optimizer(found: Any) -> bool:
    base = torch.optim.Optimizer
    return isinstance(found, type) and issubclass(found, base) and found is not base


def sparse_loop(way: Way, make: Any, rate: float, sparse: bool = True, **options: Any) -> list[Tensor]:
    """Embeddings and bags; the last of several ranks has no entry, and in every second step no loss."""
    torch.manual_seed(5)
    words = nn.Embedding(10, 3, sparse=sparse).double()
    bags = nn.EmbeddingBag(10, 3, mode="sum", sparse=sparse).double()
    optimizer = way.wrap(make([words.weight, bags.weight], lr=rate), **options)
    random = torch.Generator().manual_seed(6)
    for step in range(STEPS):
        tokens = torch.randint(0, 10, (BATCH, 4), generator=random)
        shares = tokens.tensor_split(hvd.size())
        mine = shares[way.rank] if way.together else torch.cat(shares[:-1])
        if way.together and way.rank == way.size - 1:
            mine = mine[:0]
        optimizer.zero_grad()
        if len(mine) or step % 2 == 0:
            bag = bags(mine.reshape(-1), torch.arange(0, mine.numel(), 4)).sin().sum()
            ((words(mine).square().sum() + bag) * way.size / BATCH).backward()
        else:
            optimizer.synchronize()
        optimizer.step()
    return [words.weight, bags.weight]


def sparse_gradients() -> None:
    same(lambda way: sparse_loop(way, torch.optim.SGD, 0.1))
    # Adam takes dense gradients only, so the model that is trained alone is dense itself.
    same(lambda way: sparse_loop(way, torch.optim.Adam, 0.05, sparse=way.together, sparse_as_dense=True))


def options_that_change_nothing() -> None:
    for options in (
        {"gradient_predivide_factor": 3.0},
        {"num_groups": 2},
        {"groups": 3},
        {"backward_passes_per_step": 1, "groups": "first two"},
    ):

        def train(way: Way, options: dict[str, Any] = options) -> list[Tensor]:
            model = mlp()
            chosen = {**options}
            if chosen.get("groups") == "first two":
                chosen["groups"] = [list(model[0].parameters()), [model[2].bias]]
            return plain_loop(way, model, way.wrap(sgd(model), **chosen))

        same(train)


def compression() -> None:
    for compressor in (hvd.Compression.fp16, hvd.Compression.bf16):

        def train(way: Way, compressor: Any = compressor) -> list[Tensor]:
            model = mlp().float()
            optimizer = way.wrap(sgd(model), compression=compressor)
            for inputs, targets in batches():
                optimizer.zero_grad()
                F.mse_loss(model(way.share(inputs).float()), way.share(targets).float()).backward()
                assert all(p.grad.dtype == torch.float32 for p in model.parameters())
                optimizer.step()
            return list(model.parameters())

        same(train, 2e-2)


def sums() -> None:
    def train(way: Way) -> list[Tensor]:
        model = mlp()
        optimizer = way.wrap(sgd(model), op=hvd.Sum)
        for inputs, targets in batches():
            optimizer.zero_grad()
            (F.mse_loss(model(way.share(inputs)), way.share(targets), reduction="sum") / 40).backward()
            optimizer.step()
        return list(model.parameters())

    same(train)


def adasum() -> None:
    """Equal gradients give one rank's step; different ones the same parameters everywhere."""

    def loop(way: Way, everyone_alike: bool) -> list[Tensor]:
        model = mlp()
        optimizer = way.wrap(torch.optim.Adam(model.parameters(), lr=0.05), op=hvd.Adasum)
        for inputs, targets in batches():
            optimizer.zero_grad()
            x, y = (inputs, targets) if everyone_alike else (way.share(inputs), way.share(targets))
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        return list(model.parameters())

    if hvd.size() == 2:  # of three, the one that is left over joins a pair's mean
        same(lambda way: loop(way, everyone_alike=True))
    equal_everywhere(loop(Way(together=True), everyone_alike=False))


def a_process_set_trains_for_itself() -> None:
    members = [0, hvd.size() - 1] if hvd.size() > 2 else [1]
    some = hvd.add_process_set(hvd.ProcessSet(members))
    torch.manual_seed(4)
    inputs, targets = next(batches(1))
    model, alone = mlp(), mlp()
    if hvd.rank() in members:
        optimizer = hvd.DistributedOptimizer(sgd(model), process_set=some)
        part = slice(members.index(hvd.rank()), None, len(members))
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(model(inputs[part]), targets[part]).backward()
            optimizer.step()
        plain = sgd(alone)
        for _ in range(3):
            plain.zero_grad()
            F.mse_loss(alone(inputs), targets).backward()
            plain.step()
        for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, whole)
    hvd.remove_process_set(some)


def weights_by_samples() -> None:
    """1 and 3 samples, or 1, 3 and none, count as 4; a rank may also step without a backward."""
    counts = [1, 3, 0][: hvd.size()]

    def train(way: Way) -> list[Tensor]:
        model = mlp()
        optimizer = way.wrap(sgd(model), weighted=True)
        for step, (inputs, targets) in enumerate(batches()):
            used = slice(0, sum(counts))
            if way.together:
                turned = counts[step % len(counts) :] + counts[: step % len(counts)]
                start = sum(turned[: way.rank])
                used = slice(start, start + turned[way.rank])
                optimizer.set_weight(turned[way.rank])
            optimizer.zero_grad()
            if used.stop > used.start or step % 2:
                loss = F.mse_loss(model(inputs[used]), targets[used], reduction="sum")
                (loss / max(1, used.stop - used.start)).backward()
            optimizer.step()
        return list(model.parameters())

    same(train)


CASES = [
    every_optimizer,
    sparse_gradients,
    options_that_change_nothing,
    compression,
    sums,
    adasum,
    a_process_set_trains_for_itself,
    weights_by_samples,
]
