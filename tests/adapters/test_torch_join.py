"""Uneven data: ranks that join early, even before their first batch, and come back afterwards."""

from __future__ import annotations

from hvdp.testing import run_ranks


def _epochs() -> tuple[list[float], list[str], int]:
    import torch

    import hvdp.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for _ in range(rank):
        hvd.allreduce(torch.ones(2))
    last = hvd.join()
    # Calls without a name are counted anew, or the ranks' numbers would differ from now on.
    assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for epoch in range(3):
        # In the first epoch rank 0 has nothing, so the others make the buckets without it.
        for _ in range(rank if epoch == 0 else 2):
            optimizer.zero_grad()
            (model(torch.ones(1, 3) * (rank + 1)) ** 2).mean().backward()
            optimizer.step()
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    return [p.sum().item() for p in model.parameters()], optimizer._store.names, last


def _windows_that_are_not_full() -> list[float]:
    """Ranks with 5 and 3 batches an epoch, two to a step."""
    import torch

    import hvdp.torch as hvd

    hvd.init()
    rank = hvd.rank()
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("weight", weight)], backward_passes_per_step=2
    )
    found = []
    for epoch in range(2):
        for batch in range(3 if rank else 5):
            (weight * (100 * rank + 10 * epoch + batch + 1)).sum().backward()
            if batch % 2 == 1:
                found.append(weight.grad.item())
                optimizer.step()
                optimizer.zero_grad()
        hvd.join()
        assert weight.grad is None
    return found


def test_passes_of_a_window_that_is_not_full_do_not_get_into_the_next_epoch() -> None:
    first, second = run_ranks(_windows_that_are_not_full, 2, warm=True)
    assert first == [(3 + 203) / 2, 7, (23 + 223) / 2, 27]
    assert second == [(3 + 203) / 2, (23 + 223) / 2]


def _gradients_kept_as_zeros() -> list[float]:
    """Where others have used the memory that they are in since this rank joined."""
    import torch

    import hvdp.torch as hvd

    hvd.init()
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    found = []
    for _ in range(2):
        for _ in range(3 if hvd.rank() else 1):
            weight.sum().backward()
            found.append(weight.grad.item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        hvd.join()
        assert weight.grad is None
    return found


def test_what_others_have_reduced_does_not_get_into_zeros_that_a_joined_rank_has_kept() -> None:
    assert run_ranks(_gradients_kept_as_zeros, 2, warm=True) == [[1.0] * 2, [1.0] * 6]


def test_a_rank_without_a_batch_in_the_first_window_comes_back() -> None:
    results = run_ranks(_epochs, 3, warm=True)
    assert results[0] == results[1] == results[2]
    _, names, last = results[0]
    assert names == ["weight", "bias", "parameter.2"]
    assert last == 2
