"""What training loops do: each on 2 and 3 ranks as on one process with the joined batch.

Starting torch on several ranks takes seconds, so one launch runs many cases.
"""

from __future__ import annotations

import io
import itertools
import logging
import sys
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hvdp.torch as hvd
from hvdp.testing import World, worlds

from . import choices
from .ways import SMALL_BUCKETS, Way, batches, mlp, plain_loop, run_all, same, sgd


def clipping() -> None:
    for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):

        def train(way: Way, clip: Any = clip) -> list[Tensor]:
            model = mlp()
            return plain_loop(way, model, way.wrap(sgd(model)), lambda: clip(model.parameters(), 0.05))

        same(train)


def grad_scaler() -> None:
    """An inf on one rank: all skip that step, and all scale down."""
    for unscale in (False, True):

        def train(way: Way, unscale: bool = unscale) -> list[Tensor]:
            model = mlp().float()
            optimizer = way.wrap(sgd(model))
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
            scales = []
            for step, (inputs, targets) in enumerate(batches()):
                optimizer.zero_grad()
                loss = F.mse_loss(model(way.share(inputs).float()), way.share(targets).float())
                if step == 2 and way.rank == 0:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                before = model[0].weight.detach().clone()
                if unscale:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                assert torch.equal(before, model[0].weight) == (step == 2)
                scales.append(scaler.get_scale())
            assert scales == [256.0, 512.0, 256.0, 256.0, 512.0]
            return list(model.parameters())

        same(train, 1e-5)


def gradients_that_are_dropped() -> None:
    """zero_grad between backward and step, with the optimizer or the model: that batch never was."""
    for passes, drop, none in itertools.product((1, 2), ("optimizer", "model"), (True, False)):

        def train(way: Way, passes: int = passes, drop: str = drop, none: bool = none) -> list[Tensor]:
            model = mlp()
            optimizer = way.wrap(sgd(model), backward_passes_per_step=passes)
            for step, (inputs, targets) in enumerate(batches()):
                optimizer.zero_grad()
                x, y = way.share(inputs), way.share(targets)
                if step % 2:
                    F.mse_loss(model(x) + 1, y).backward()
                    (optimizer if drop == "optimizer" else model).zero_grad(set_to_none=none)
                if step != 3:
                    for _ in range(passes):
                        (F.mse_loss(model(x), y) / passes).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            return list(model.parameters())

        same(train)


def more_passes_than_agreed_and_fewer() -> None:
    """What comes after the reduction of a window is reduced by step(), too; so is half a window."""

    def train(way: Way) -> list[Tensor]:
        model = mlp()
        optimizer = way.wrap(sgd(model), backward_passes_per_step=2)
        for passes, (inputs, targets) in zip((2, 3, 1, 4, 5), batches(), strict=True):
            optimizer.zero_grad()
            for part in range(passes):
                (F.mse_loss(model(way.share(inputs)), way.share(targets)) / (part + 1)).backward()
            optimizer.step()
        return list(model.parameters())

    same(train)


def schedulers_and_hooks_of_ones_own() -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def train(way: Way) -> list[Tensor]:
        model = mlp()
        model[0].weight.register_hook(lambda gradient: gradient * 2)
        model[2].weight.register_post_accumulate_grad_hook(halve)
        model[4].register_full_backward_hook(lambda module, inner, outer: (inner[0] * 1.5,))
        optimizer = way.wrap(sgd(model))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return plain_loop(way, model, optimizer)

    same(train)


def autocast() -> None:
    tolerance = 1e-2

    def train(way: Way) -> list[Tensor]:
        model = mlp().float()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = way.wrap(sgd(model))
        for inputs, targets in batches():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                found = model(way.share(inputs).float())
            assert found.dtype is torch.bfloat16
            F.mse_loss(found.float(), way.share(targets).float()).backward()
            optimizer.step()
        for old, parameter in zip(before, model.parameters(), strict=True):
            assert (parameter - old).abs().max() > 5 * tolerance
        return list(model.parameters())

    same(train, tolerance)


def compiled_modules() -> None:
    for backend in ("eager", "aot_eager"):

        def train(way: Way, backend: str = backend) -> list[Tensor]:
            torch.compiler.reset()
            model = mlp()
            optimizer = way.wrap(sgd(model), named_parameters=model.named_parameters())
            return plain_loop(way, torch.compile(model, backend=backend), optimizer)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            same(train)


def compiled_steps_and_norms() -> None:
    """hvdp's own part of a step, and the collectives in SyncBatchNorm, are no matter for the compiler."""

    def train(way: Way) -> list[Tensor]:
        torch.compiler.reset()
        model = mlp().insert(1, nn.BatchNorm1d(8).double())
        if way.together:
            hvd.SyncBatchNorm.convert_sync_batchnorm(model)
        optimizer = way.wrap(sgd(model), named_parameters=model.named_parameters())
        compiled = torch.compile(model, backend="aot_eager")
        step = torch.compile(optimizer.step, backend="eager")
        for inputs, targets in batches():
            optimizer.zero_grad()
            F.mse_loss(compiled(way.share(inputs)), way.share(targets)).backward()
            step()
        return list(model.parameters())

    logging.getLogger("torch._logging").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        same(train, 1e-7)


def activation_checkpointing() -> None:
    """A reentrant checkpoint runs a backward within the backward, and here one within that."""

    def forward(model: nn.Sequential, x: Tensor, reentrant: bool) -> Tensor:
        def outer(hidden: Tensor) -> Tensor:
            return model[3:](checkpoint(model[1:3], hidden, use_reentrant=reentrant))

        hidden = checkpoint(model[:1], x.requires_grad_(), use_reentrant=reentrant)
        found = checkpoint(outer, hidden, use_reentrant=reentrant)
        assert isinstance(found, Tensor)
        return found

    for reentrant, op, passes in itertools.product((False, True), (hvd.Average, hvd.Sum), (1, 2)):

        def train(way: Way, reentrant: bool = reentrant, op: Any = op, passes: int = passes) -> list[Tensor]:
            model = mlp()
            optimizer = way.wrap(sgd(model), op=op, backward_passes_per_step=passes)
            share = passes * (way.size if op == hvd.Sum else 1)
            for inputs, targets in batches():
                optimizer.zero_grad()
                for _ in range(passes):
                    found = forward(model, way.share(inputs), reentrant)
                    (F.mse_loss(found, way.share(targets)) / share).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
            return list(model.parameters())

        same(train)


def gradients_of_gradients() -> None:
    def train(way: Way) -> list[Tensor]:
        model = mlp()
        optimizer = way.wrap(sgd(model))
        for inputs, targets in batches():
            x = way.share(inputs).requires_grad_()
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), way.share(targets))
            (slope,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
            (loss + slope.square().mean()).backward()
            optimizer.step()
        return list(model.parameters())

    same(train)


def shared_parameters_in_several_backwards() -> None:
    def train(way: Way) -> list[Tensor]:
        model = mlp()
        model[2].weight = nn.Parameter(model[2].weight.detach().T.clone())
        tied = nn.Linear(8, 8).double()
        tied.weight = model[2].weight
        optimizer = way.wrap(torch.optim.SGD([*model.parameters(), tied.bias], lr=0.1))
        for inputs, targets in batches():
            x, y = way.share(inputs), way.share(targets)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            tied(model[:2](x)).square().mean().backward()
            model[:2](x).square().mean().backward()
            optimizer.step()
        return [*model.parameters(), tied.bias]

    same(train)


def complex_parameters() -> None:
    def train(way: Way) -> list[Tensor]:
        torch.manual_seed(5)
        matrix = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))
        single = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        optimizer = way.wrap(torch.optim.Adam([matrix, single], lr=0.05))
        for inputs, targets in batches():
            optimizer.zero_grad()
            found = way.share(inputs).to(torch.complex128) @ matrix + single
            (found - way.share(targets) * 1j).abs().square().mean().backward()
            optimizer.step()
        return [matrix, single]

    same(train, 1e-5)


def two_models_of_the_same_names() -> None:
    """As two players do: each one's backward also reaches the other's parameters."""

    def train(way: Way) -> list[Tensor]:
        maker, judge = mlp(), nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        other = mlp()
        optimizers = [
            way.wrap(sgd(net), named_parameters=net.named_parameters()) for net in (maker, judge, other)
        ]
        for inputs, targets in batches():
            x, y = way.share(inputs), way.share(targets)
            optimizers[0].zero_grad()
            judge(maker(x)).square().mean().backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            (judge(y).mean() - judge(maker(x).detach()).mean()).backward()
            optimizers[1].step()
            optimizers[2].zero_grad()
            F.mse_loss(other(x), maker(x).detach()).backward()
            optimizers[2].step()
        return [*maker.parameters(), *judge.parameters(), *other.parameters()]

    same(train)


def a_checkpoint_needs_no_hvdp() -> None:
    model = mlp()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01), model.named_parameters(), lr_scaling="linear"
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    plain_loop(Way(together=True), model, optimizer)
    scheduler.step()
    file = io.BytesIO()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rates": scheduler.state_dict()},
        file,
    )
    whole = io.BytesIO()
    torch.save(optimizer, whole)
    blocked = {name: None for name in sys.modules if name.split(".")[0] == "hvdp"}
    with mock.patch.dict(sys.modules, blocked):
        with pytest.raises(ImportError):
            import hvdp  # noqa: F401
        found = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        twin = mlp()
        twin.load_state_dict(found["model"])
        plain = torch.optim.AdamW(twin.parameters())
        plain.load_state_dict(found["optimizer"])
        plain_loop(Way(together=False), twin, plain)
        loaded = torch.load(io.BytesIO(whole.getvalue()), weights_only=False)
        assert type(loaded) is torch.optim.AdamW


CASES = [
    clipping,
    grad_scaler,
    gradients_that_are_dropped,
    more_passes_than_agreed_and_fewer,
    schedulers_and_hooks_of_ones_own,
    autocast,
    compiled_modules,
    compiled_steps_and_norms,
    activation_checkpointing,
    gradients_of_gradients,
    shared_parameters_in_several_backwards,
    complex_parameters,
    two_models_of_the_same_names,
    a_checkpoint_needs_no_hvdp,
]


@pytest.mark.parametrize("world", worlds(shm=(2, 3)), ids=str)
def test_many_ranks_train_as_one_process_does(world: World) -> None:
    world.run(run_all, [*choices.CASES, *CASES], env=SMALL_BUCKETS, timeout=100)
