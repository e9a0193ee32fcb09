"""Windows that do not go as planned: what would be a wrong number is right, or an error on every rank."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hvdp.torch as hvd
from hvdp.errors import InvalidArgumentError, MismatchError
from hvdp.testing import World, worlds

from . import weights
from .small import SMALL_BUCKETS, sgd, start, two

AGAIN = "gradients were computed again before step"


def sums_are_not_summed_again() -> None:
    """Also where the second backward has other parameters, sparse gradients or compressed ones."""
    _, size, _ = start()
    (a, b), (c, _) = two(), two()
    words = nn.Embedding(3, 1, sparse=True)
    for optimizer, losses in (
        (sgd([a, b], op=hvd.Sum), (lambda: a.sum(), lambda: b.sum())),
        (sgd([c], op=hvd.Sum, compression=hvd.Compression.fp16), (lambda: c.sum(), lambda: c.sum())),
        (sgd([words.weight], op=hvd.Sum), (lambda: words(torch.tensor([1])).sum(),) * 2),
    ):
        for to_none in (True, False):
            optimizer.zero_grad(set_to_none=to_none)
            losses[0]().backward()
            with pytest.raises(InvalidArgumentError, match=AGAIN):
                losses[1]().backward()
            # What was dropped may be computed again.
            optimizer.zero_grad(set_to_none=to_none)
            losses[0]().backward()
            optimizer.zero_grad(set_to_none=to_none)
            losses[0]().backward()
            gradient = optimizer.param_groups[0]["params"][0].grad.to_dense()
            assert gradient.sum() == size
            optimizer.step()


def sums_are_used_twice() -> None:
    """By two steps, or by one after another parameter has come; and not by a closure that adds to them."""
    _, size, _ = start()
    for options in ({}, {"compression": hvd.Compression.bf16}):
        (a, b), words = two(), nn.Embedding(3, 1, sparse=True)
        nn.init.zeros_(words.weight)
        optimizer = sgd([a, words.weight], op=hvd.Sum, **options)
        for turn in (1, 2):
            optimizer.zero_grad(set_to_none=turn == 1)
            (a.sum() + words(torch.tensor([1])).sum()).backward()
            optimizer.step()
            optimizer.step()
            torch.testing.assert_close(a.detach(), torch.tensor([-2.0 * size * turn]))
            torch.testing.assert_close(words.weight[1].detach(), torch.tensor([-2.0 * size * turn]))
        with pytest.raises(InvalidArgumentError, match=AGAIN):
            optimizer.step(lambda a=a: a.sum().backward())
        a.grad.zero_()
        a.sum().backward()
        optimizer.add_param_group({"params": [b]})
        optimizer.step()
        torch.testing.assert_close(a.detach(), torch.tensor([-5.0 * size]))
        with torch.no_grad():
            a.grad.fill_(1.0)
        optimizer.step()
        torch.testing.assert_close(a.detach(), torch.tensor([-6.0 * size]))


def sums_are_zeroed_by_the_model() -> None:
    """After a step, or where it was skipped."""
    _, size, _ = start()
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    model[1].requires_grad_(False)
    optimizer = sgd(model.parameters(), op=hvd.Sum)
    for turn in range(6):
        if turn == 2:
            model[1].requires_grad_(True)
        model.zero_grad(set_to_none=turn == 5)
        model(torch.ones(1, 2)).sum().backward()
        torch.testing.assert_close(model[0].bias.grad, size * model[1].weight[0].detach())
        if turn % 2:
            optimizer.step()


def a_backward_that_failed_leaves_nothing() -> None:
    rank, _, mean = start()
    a, b = two()
    optimizer = sgd([a, b])

    def raising(gradient: Tensor) -> None:
        raise MemoryError

    for step in range(4):
        optimizer.zero_grad()
        if step == 2:
            middle = a * 1.0
            middle.register_hook(raising)
            with pytest.raises(MemoryError):
                (middle.sum() + 1000 * b.sum()).backward()
            optimizer.zero_grad()
        ((a + b) * (rank + 1)).sum().backward()
        assert a.grad == b.grad == mean
        optimizer.step()


def a_shared_layer_in_reentrant_checkpoints_is_refused() -> None:
    start()
    layer = nn.Linear(4, 4)
    optimizer = sgd(layer.parameters())
    for step in range(2):
        optimizer.zero_grad()
        x = torch.ones(1, 4, requires_grad=True)
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=True)
        if step == 0:
            x.sum().backward()
            optimizer.step()
        else:
            with pytest.raises(InvalidArgumentError, match="use_reentrant=False"):
                x.sum().backward()
    optimizer.zero_grad()


def closures_with_fewer_passes() -> None:
    """Than agreed, or with none on some ranks; and with sums."""
    rank, size, mean = start()
    for options, wanted in (
        ({"backward_passes_per_step": 3}, mean),
        ({"op": hvd.Sum}, mean * size),
        ({}, 1 / size),
    ):
        a, _ = two()
        optimizer = sgd([a], **options)

        def closure(a: Any = a, optimizer: Any = optimizer, some: bool = not options) -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = (a * (rank + 1)).sum()
            if not some or rank == 0:
                loss.backward()
            return loss

        for step in range(3):
            optimizer.step(closure)
            torch.testing.assert_close(a.detach(), torch.tensor([-wanted * (step + 1)]))


def steps_within_backward() -> None:
    """An optimizer a parameter, each stepped by a hook as soon as the gradient is there."""
    rank, _, mean = start()
    for wrap_first in (True, False):
        pair = two()
        plain = {p: torch.optim.SGD([p], lr=1.0) for p in pair}

        def step(parameter: Tensor, optimizers: Any = plain) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        if not wrap_first:
            for p in pair:
                p.register_post_accumulate_grad_hook(step)
        for optimizer in plain.values():
            hvd.DistributedOptimizer(optimizer)
        if wrap_first:
            for p in pair:
                p.register_post_accumulate_grad_hook(step)
        for turn in range(4):
            (sum(pair) * (rank + 1)).sum().backward()
            assert all(p == -mean * (turn + 1) for p in pair)


def windows_whose_step_is_skipped() -> None:
    """Then one with gradients made by hand, or with a backward on some ranks only."""
    rank, size, mean = start()
    for op, factor in ((hvd.Average, 1), (hvd.Sum, size)):
        model = nn.Linear(2, 1, bias=False)
        optimizer = sgd(model.parameters(), op=op)
        for clear in (optimizer.zero_grad, model.zero_grad):
            for by_hand in (True, False):
                clear()
                model(torch.ones(1, 2)).sum().backward()
                clear()
                loss = model(torch.full((1, 2), rank + 1.0)).sum()
                if by_hand:
                    (model.weight.grad,) = torch.autograd.grad(loss, model.weight)
                    if op is hvd.Sum and clear == model.zero_grad:
                        continue  # as well a sum that was replaced by what was made of it
                elif rank == 0:
                    loss.backward()
                optimizer.step()
                wanted = mean * factor if by_hand else factor / size
                torch.testing.assert_close(model.weight.grad, torch.full((1, 2), wanted))


def an_inf_in_a_short_window() -> None:
    """Seen by all ranks once gradients are reduced, which step() would do too late."""
    rank, _, _ = start()
    a, _ = two()
    optimizer = sgd([a], backward_passes_per_step=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for turn in range(3):
        optimizer.zero_grad()
        for _ in range(4 if turn == 0 else 2):
            factor = float("inf") if turn == 1 and rank == 0 else 1.0
            scaler.scale((a * factor).sum()).backward()
        optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0
    assert a.item() == -(4 + 2)


def parameters_that_never_have_a_gradient() -> None:
    _, _, _ = start()
    a, _ = two()
    table = nn.Parameter(torch.arange(3), requires_grad=False)
    optimizer = sgd([a, table])
    for _ in range(2):
        optimizer.zero_grad()
        a.sum().backward()
        optimizer.step()
    assert table.tolist() == [0, 1, 2]
    words = nn.Embedding(3, 1, sparse=True)
    optimizer = sgd(words.parameters(), num_groups=2)
    words(torch.tensor([1])).sum().backward()
    optimizer.step()


def groups_added_later_are_scaled_alike() -> None:
    _, size, _ = start()
    optimizer = sgd([nn.Parameter(torch.zeros(1))], lr_scaling="linear")
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.5})
    wanted = [1.0 * size, 0.5 * size]
    assert [group["lr"] for group in optimizer.param_groups] == wanted
    optimizer.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == wanted


def options_that_differ() -> None:
    rank, size, _ = start()
    odd = rank == size - 1
    a, b = two()
    for option, usual, other in (
        ("op", hvd.Average, hvd.Adasum),
        ("weighted", False, True),
        ("groups", [[a]], [[b]]),
        ("backward_passes_per_step", 1, 2),
    ):
        with pytest.raises(
            MismatchError, match=f"the ranks pass different options: .* and .* on rank {size - 1}"
        ):
            sgd([a, b], **{option: other if odd else usual})


def clipping_what_is_not_averaged_yet() -> None:
    """After a tail of a window: a word, once; none where synchronize() came first or nothing was changed."""
    rank, _, _ = start()
    a, b = two()
    optimizer = sgd([a, b], backward_passes_per_step=2)
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hvdp").addHandler(handler)
    for clips, synchronizes, told in ((False, False, 0), (True, True, 0), (True, False, 1), (True, False, 1)):
        optimizer.zero_grad()
        (a.sum() + b.sum()).backward()
        if synchronizes:
            optimizer.synchronize()
        if clips:
            nn.utils.clip_grad_norm_([a, b], 0.5)
        optimizer.step()
        assert len(texts) == told, texts
    logging.getLogger("hvdp").removeHandler(handler)
    assert texts[0].startswith(f"rank {rank} changed gradients (by clipping?)")
    assert "fewer than the 2 backward() calls" in texts[0]


CASES = [
    clipping_what_is_not_averaged_yet,
    sums_are_not_summed_again,
    sums_are_used_twice,
    sums_are_zeroed_by_the_model,
    a_backward_that_failed_leaves_nothing,
    a_shared_layer_in_reentrant_checkpoints_is_refused,
    closures_with_fewer_passes,
    steps_within_backward,
    windows_whose_step_is_skipped,
    an_inf_in_a_short_window,
    parameters_that_never_have_a_gradient,
    groups_added_later_are_scaled_alike,
    options_that_differ,
    *weights.CASES,
]


def _run_all() -> None:
    for case in CASES:
        case()


@pytest.mark.parametrize("world", worlds(shm=(3,)), ids=str)
def test_windows(world: World) -> None:
    world.run(_run_all, env=SMALL_BUCKETS, timeout=100)
