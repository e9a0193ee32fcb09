"""Windows that do not go as planned: what would be a wrong number is right, or an error on every rank."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hvdp.torch as hvd
from hvdp.errors import InvalidArgumentError, MismatchError
from hvdp.testing import World, worlds

SMALL_BUCKETS = {"HVDP_FUSION_THRESHOLD": "64"}
AGAIN = "gradients were computed again before step"


def _start() -> tuple[int, int, float]:
    """Rank, size, and the average of rank + 1 over the ranks."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.manual_seed(3)
    hvd.init()
    return hvd.rank(), hvd.size(), (hvd.size() + 1) / 2


def _two() -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))


def _sgd(parameters: Any, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), **options)


def sums_are_not_summed_again() -> None:
    """Also where the second backward has other parameters, sparse gradients or compressed ones."""
    _, size, _ = _start()
    (a, b), (c, _) = _two(), _two()
    words = nn.Embedding(3, 1, sparse=True)
    for optimizer, losses in (
        (_sgd([a, b], op=hvd.Sum), (lambda: a.sum(), lambda: b.sum())),
        (_sgd([c], op=hvd.Sum, compression=hvd.Compression.fp16), (lambda: c.sum(), lambda: c.sum())),
        (_sgd([words.weight], op=hvd.Sum), (lambda: words(torch.tensor([1])).sum(),) * 2),
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
    _, size, _ = _start()
    for options in ({}, {"compression": hvd.Compression.bf16}):
        (a, b), words = _two(), nn.Embedding(3, 1, sparse=True)
        nn.init.zeros_(words.weight)
        optimizer = _sgd([a, words.weight], op=hvd.Sum, **options)
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
    _, size, _ = _start()
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    model[1].requires_grad_(False)
    optimizer = _sgd(model.parameters(), op=hvd.Sum)
    for turn in range(6):
        if turn == 2:
            model[1].requires_grad_(True)
        model.zero_grad(set_to_none=turn == 5)
        model(torch.ones(1, 2)).sum().backward()
        torch.testing.assert_close(model[0].bias.grad, size * model[1].weight[0].detach())
        if turn % 2:
            optimizer.step()


def a_backward_that_failed_leaves_nothing() -> None:
    rank, _, mean = _start()
    a, b = _two()
    optimizer = _sgd([a, b])

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
    _start()
    layer = nn.Linear(4, 4)
    optimizer = _sgd(layer.parameters())
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
    rank, size, mean = _start()
    for options, wanted in (
        ({"backward_passes_per_step": 3}, mean),
        ({"op": hvd.Sum}, mean * size),
        ({}, 1 / size),
    ):
        a, _ = _two()
        optimizer = _sgd([a], **options)

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
    rank, _, mean = _start()
    for wrap_first in (True, False):
        pair = _two()
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
    rank, size, mean = _start()
    for op, factor in ((hvd.Average, 1), (hvd.Sum, size)):
        model = nn.Linear(2, 1, bias=False)
        optimizer = _sgd(model.parameters(), op=op)
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


def gradients_of_ranks_without_weight() -> None:
    """A parameter that only they use is not used."""
    rank, size, _ = _start()
    for everyone in (False, True):
        a, b = _two()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW([a, b], lr=0.1, weight_decay=0.5), weighted=True
        )
        nobody = rank == size - 1 or everyone
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.set_weight(0 if nobody else 2)
            (a.sum() + b.sum() if rank == size - 1 else a.sum()).backward()
            assert b.grad is None
            assert (a.grad is None) == everyone
            optimizer.step()
        assert len(set(hvd.allgather_object(float(a.detach())))) == 1
    words = nn.Embedding(3, 1, sparse=True)
    optimizer = _sgd(words.parameters(), weighted=True)
    for last in (0, size - 1):
        optimizer.zero_grad()
        optimizer.set_weight(0 if rank == last else 2)
        (words(torch.tensor([rank])).sum() * (float("nan") if rank == last else 1.0)).backward()
        gradient = words.weight.grad.to_dense().flatten()[:size]
        assert gradient.isfinite().all()
        assert (gradient > 0).tolist() == [member != last for member in range(size)]
        optimizer.step()


def many_samples_of_16_bit_embeddings() -> None:
    """More than such floats can count."""
    rank, _, mean = _start()
    for dtype in (torch.float16, torch.bfloat16):
        words = nn.Embedding(3, 1, sparse=True, dtype=dtype)
        optimizer = _sgd(words.parameters(), weighted=True)
        for weight in (70_000, 1):
            optimizer.zero_grad()
            optimizer.set_weight(weight)
            (words(torch.tensor([1])) * (32 * (rank + 1))).sum().backward()
            assert words.weight.grad.dtype is dtype
            assert words.weight.grad.to_dense().tolist() == [[0], [32 * mean], [0]]
            optimizer.step()


def one_weight_for_all_passes_of_a_step() -> None:
    rank, size, _ = _start()
    a, _ = _two()
    optimizer = _sgd([a], weighted=True, backward_passes_per_step=2)
    counts = [(1, 3), (3, 4), (0, 2)][rank]
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.set_weight(sum(counts))
        for turn, count in enumerate(counts):
            # Each sample's slope is 10 to the power of the pass.
            (a * (10.0**turn * count / sum(counts))).sum().backward()
        everyone = [(1, 3), (3, 4), (0, 2)][:size]
        total = sum(x + 10 * y for x, y in everyone) / sum(x + y for x, y in everyone)
        torch.testing.assert_close(a.grad, torch.tensor([total]))
        optimizer.step()
    a.sum().backward()
    with pytest.raises(InvalidArgumentError, match="the samples of the whole step"):
        optimizer.set_weight(99)
    optimizer.set_weight(sum(counts))
    optimizer.step()


def a_weight_that_comes_too_late() -> None:
    rank, size, _ = _start()
    a, _ = _two()
    optimizer = _sgd([a], weighted=True)
    for step in range(2):
        optimizer.zero_grad()
        optimizer.set_weight(rank + 1 + step)
        (a * (rank + 1.0)).sum().backward()
        optimizer.set_weight(rank + 1 + step)
        optimizer.step()
    at = a.item()
    a.sum().backward()
    optimizer.set_weight(rank + 9)
    with pytest.raises(
        InvalidArgumentError, match=rf"set_weight\({rank + 9}.*weight {rank + 2}.*before backward"
    ):
        optimizer.step()
    assert a.item() == at
    optimizer.zero_grad()
    (a * (rank + 1.0)).sum().backward()
    optimizer.step()
    weights = torch.arange(size) + 9.0
    torch.testing.assert_close(
        a.grad.item(), ((torch.arange(size) + 1) * weights).sum().item() / weights.sum().item()
    )
    for wrong in (float("inf"), float("nan"), -1):
        with pytest.raises(InvalidArgumentError, match="finite number that is not negative"):
            optimizer.set_weight(wrong)


def an_inf_in_a_short_window() -> None:
    """Seen by all ranks once gradients are reduced, which step() would do too late."""
    rank, _, _ = _start()
    a, _ = _two()
    optimizer = _sgd([a], backward_passes_per_step=4)
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
    _, _, _ = _start()
    a, _ = _two()
    table = nn.Parameter(torch.arange(3), requires_grad=False)
    optimizer = _sgd([a, table])
    for _ in range(2):
        optimizer.zero_grad()
        a.sum().backward()
        optimizer.step()
    assert table.tolist() == [0, 1, 2]
    words = nn.Embedding(3, 1, sparse=True)
    optimizer = _sgd(words.parameters(), num_groups=2)
    words(torch.tensor([1])).sum().backward()
    optimizer.step()


def groups_added_later_are_scaled_alike() -> None:
    _, size, _ = _start()
    optimizer = _sgd([nn.Parameter(torch.zeros(1))], lr_scaling="linear")
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.5})
    wanted = [1.0 * size, 0.5 * size]
    assert [group["lr"] for group in optimizer.param_groups] == wanted
    optimizer.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == wanted


def options_that_differ() -> None:
    rank, size, _ = _start()
    odd = rank == size - 1
    a, b = _two()
    for option, usual, other in (
        ("op", hvd.Average, hvd.Adasum),
        ("weighted", False, True),
        ("groups", [[a]], [[b]]),
        ("backward_passes_per_step", 1, 2),
    ):
        with pytest.raises(
            MismatchError, match=f"the ranks pass different options: .* and .* on rank {size - 1}"
        ):
            _sgd([a, b], **{option: other if odd else usual})


def clipping_what_is_not_averaged_yet() -> None:
    """After a tail of a window: a word, once; none where synchronize() came first or nothing was changed."""
    rank, _, _ = _start()
    a, b = _two()
    optimizer = _sgd([a, b], backward_passes_per_step=2)
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
    gradients_of_ranks_without_weight,
    many_samples_of_16_bit_embeddings,
    one_weight_for_all_passes_of_a_step,
    a_weight_that_comes_too_late,
    an_inf_in_a_short_window,
    parameters_that_never_have_a_gradient,
    groups_added_later_are_scaled_alike,
    options_that_differ,
]


def _run_all() -> None:
    for case in CASES:
        case()


@pytest.mark.parametrize("world", worlds(shm=(3,)), ids=str)
def test_windows(world: World) -> None:
    world.run(_run_all, env=SMALL_BUCKETS, timeout=100)
