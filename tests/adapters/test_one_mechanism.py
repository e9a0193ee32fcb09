"""One mechanism under all frameworks: ranks of different ones work together by names alone."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
pytest.importorskip("jax", reason="JAX is not installed")

from hvdp.testing import run_ranks

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}


def _exchange() -> None:
    import numpy as np

    import hvdp

    hvdp.init()
    rank = hvdp.rank()
    values = np.arange(6, dtype=np.float32).reshape(2, 3) * (rank + 1)
    rows = np.full((rank + 1, 2), rank, np.float32)
    hvd: Any
    if rank == 0:
        import tensorflow

        import hvdp.tensorflow as hvd

        made = tensorflow.constant
    elif rank == 1:
        import torch

        import hvdp.torch as hvd

        made = torch.tensor
    elif rank == 2:
        import jax
        from jax.experimental import io_callback

        import hvdp as hvd

        made = jax.numpy.asarray
    else:
        import hvdp as hvd

        made = np.asarray

    def reduced(tensor: Any) -> Any:
        return hvd.allreduce(tensor, name="mean")

    mean = np.arange(6).reshape(2, 3) * 2.5
    np.testing.assert_allclose(np.asarray(reduced(made(values))), mean)
    compiled = reduced
    if rank == 0:
        compiled = tensorflow.function(reduced, autograph=False)
    if rank == 2:
        shape = jax.ShapeDtypeStruct((2, 3), np.float32)
        compiled = jax.jit(lambda x: io_callback(reduced, shape, x, ordered=True))
    np.testing.assert_allclose(np.asarray(compiled(made(values))), mean)
    gathered = hvd.allgather(made(rows), name="rows")
    np.testing.assert_allclose(np.asarray(gathered), np.repeat(np.arange(4), [1, 2, 3, 4])[:, None] * [1, 1])
    sent = hvd.broadcast(made(values), 2, name="sent")
    np.testing.assert_allclose(np.asarray(sent), np.arange(6).reshape(2, 3) * 3)
    with pytest.raises(hvdp.MismatchError):
        hvd.allreduce(made(np.ones(rank + 1, np.float32)), name="wrong")


@pytest.mark.timeout(200)
def test_four_frameworks_exchange_tensors_by_name() -> None:
    run_ranks(_exchange, 4, env=QUIET, timeout=150)


def _side_by_side() -> None:
    import keras
    import numpy as np
    import torch

    import hvdp.keras
    import hvdp.torch

    hvdp.keras.init()
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    dense = keras.layers.Dense
    model = keras.Sequential([keras.layers.Input((4,)), dense(8, activation="tanh"), dense(2)])
    model.set_weights([parameter.detach().numpy().T for parameter in net.parameters()])
    optimizer = hvdp.keras.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer, "mse")
    torch_optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    torch_optimizer = hvdp.torch.DistributedOptimizer(torch_optimizer, net.named_parameters())

    random = np.random.default_rng(hvdp.keras.rank())
    for _ in range(5):
        x, y = random.normal(size=(6, 4)).astype("float32"), random.normal(size=(6, 2)).astype("float32")
        model.train_on_batch(x, y)
        torch_optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(torch.tensor(x)), torch.tensor(y)).backward()
        torch_optimizer.step()
        for ours, theirs in zip(model.get_weights(), net.parameters(), strict=True):
            np.testing.assert_allclose(ours, theirs.detach().numpy().T, atol=1e-6)


def test_a_keras_model_and_its_torch_copy_stay_equal() -> None:
    run_ranks(_side_by_side, 2, env={**QUIET, "KERAS_BACKEND": "torch"}, timeout=100)
