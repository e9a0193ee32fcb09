"""TensorFlow tensors: eager and in graphs, with gradients.

Starting TensorFlow takes seconds, so one launch runs many cases.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from hvdp.testing import run_ranks

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "HVDP_FUSION_THRESHOLD": "400"}


def _cases() -> None:
    import numpy as np
    import tensorflow as tf

    import hvdp.tensorflow as hvd

    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    ranks = np.arange(size) + 1

    def function(call: Any) -> Any:
        return tf.function(call, autograph=False)  # whose source AutoGraph does not find

    def same(found: Any, wanted: Any) -> None:
        np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(wanted, np.float64), rtol=1e-6)

    def each_way(call: Any, *args: Any) -> list[Any]:
        return [call(*args), function(call)(*args), function(call)(*args)]

    # Reductions, dtypes, static shapes.
    for dtype in (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32):
        x = tf.cast(tf.fill([2, 3], rank + 1), dtype)
        for found in each_way(lambda x: hvd.allreduce(x, op=hvd.Sum), x):
            assert found.dtype == dtype
            assert found.shape == [2, 3]
            same(tf.cast(found, tf.float64), np.full((2, 3), ranks.sum()))
    x = tf.constant([1.0, 2.0]) * (rank + 1)
    for found in each_way(hvd.allreduce, x):
        same(found, np.array([1.0, 2.0]) * ranks.mean())
    for found in each_way(hvd.allreduce, tf.constant([rank, -rank])):
        same(found, [ranks.sum() // size - 1, -(ranks.sum() - size) // size])  # rounded down
    with pytest.raises(ValueError, match="bool"):
        hvd.allreduce(tf.constant([True]))
    for found in each_way(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16), x):
        assert found.dtype == tf.float32
        same(found, np.array([1.0, 2.0]) * ranks.mean())
    for found in each_way(lambda x: hvd.allreduce(x, op=hvd.Max, name="largest"), x):
        same(found, np.array([1.0, 2.0]) * size)
    for first, second in each_way(lambda x: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum), x):
        same(first, np.array([1.0, 2.0]) * ranks.sum())
        same(second, np.array([2.0, 4.0]) * ranks.sum())

    # Many at once in one graph, on one thread: each rank takes them in the same order.
    def several(x: Any) -> Any:
        return tf.add_n([hvd.allreduce(x * i) for i in range(8)])

    def many(x: Any) -> Any:
        (total,) = tf.while_loop(
            lambda _: True, lambda sum: [sum + several(x)], [x * 0], maximum_iterations=3
        )
        total += tf.cond(tf.reduce_sum(x) > 0, lambda: hvd.allreduce(x), lambda: x)
        return total + hvd.allreduce(x)

    same(function(many)(x), np.array([1.0, 2.0]) * ranks.mean() * (3 * 28 + 2))

    # Movements, with different numbers of rows.
    rows = tf.fill([rank + 1, 2], float(rank))
    for found in each_way(hvd.allgather, rows):
        same(found, np.repeat(np.arange(size), ranks)[:, None] * np.ones(2))
    for found in each_way(lambda x: hvd.grouped_allgather([x, x[:1]])[1], rows):
        same(found, np.arange(size)[:, None] * np.ones(2))
    for found in each_way(lambda x: hvd.broadcast(x, size - 1), x):
        same(found, np.array([1.0, 2.0]) * size)
    parts = tf.range(2 * size, dtype=tf.float32) + 100 * rank
    for found in each_way(hvd.alltoall, parts):
        same(found, [100 * r + 2 * rank + i for r in range(size) for i in range(2)])
    splits = [rank + 1] * size
    parts = tf.fill([size * (rank + 1)], float(rank))
    for found, received in each_way(lambda x: hvd.alltoall(x, splits), parts):
        same(found, np.repeat(np.arange(size), ranks))
        same(received, ranks)
    even = tf.reshape(tf.range(4.0 * size), [2 * size, 2])
    for found in each_way(lambda x: hvd.reducescatter(x, op=hvd.Sum), even):
        same(found, even.numpy()[2 * rank : 2 * rank + 2] * size)
    for found in each_way(lambda x: hvd.grouped_reducescatter([x, 2 * x[:size]])[1], even):
        same(found, 2 * even.numpy()[rank : rank + 1])

    # Gradients, of the sum of all ranks' losses.
    def gradient(call: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(call(x)) * (rank + 1)
        return tape.gradient(loss, x)

    for call, wanted in [
        (lambda x: hvd.allreduce(x, op=hvd.Sum), ranks.sum()),
        (hvd.allreduce, ranks.mean()),
        (hvd.allgather, ranks.sum()),
        (lambda x: hvd.broadcast(x, 0), ranks.sum() if rank == 0 else 0),
        (lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[1], ranks.sum()),
        (lambda x: hvd.reducescatter(x, op=hvd.Sum), np.repeat(ranks, rank_rows(size))[: 2 * size, None]),
    ]:
        x = tf.ones([2 * size, 2])
        for found in each_way(lambda x, call=call: gradient(call, x), x):
            same(found, np.ones((2 * size, 2)) * wanted)
    x = tf.ones([rank + 1, 2])
    for found in each_way(lambda x: gradient(hvd.allgather, x), x):
        same(found, np.ones((rank + 1, 2)) * ranks.sum())
    for found in each_way(lambda x: gradient(lambda x: hvd.alltoall(x, splits)[0], x), parts):
        same(found, np.repeat(ranks, rank + 1))

    # IndexedSlices.
    slices = tf.IndexedSlices(tf.fill([rank + 1, 2], 1.0), tf.range(rank + 1), tf.constant([size, 2]))
    dense = tf.convert_to_tensor(hvd.allreduce(slices, op=hvd.Sum))
    same(dense, np.arange(size, 0, -1)[:, None] * np.ones(2))
    same(tf.convert_to_tensor(hvd.allreduce(slices)), dense / size)
    same(function(lambda: tf.convert_to_tensor(hvd.allreduce(slices)))(), dense / size)
    other = tf.IndexedSlices(slices.values, slices.indices, tf.constant([size + rank, 2]))
    with pytest.raises(hvd.MismatchError, match="shape is"):
        hvd.allreduce(other, name="other")

    # Variables, objects, numbers.
    a, b = tf.Variable([1.0 * rank, 2.0]), tf.Variable(rank)
    hvd.broadcast_variables([a, b], root_rank=size - 1)
    same(a, [size - 1, 2])
    same(b, size - 1)
    a.assign([1.0 * rank, 5.0])
    function(lambda: hvd.broadcast_([a], 0) and None)()
    same(a, [0, 5])
    assert hvd.broadcast_object_fn(root_rank=1 % size)({"rank": rank}) == {"rank": 1 % size}
    assert hvd.allgather_object(rank) == list(range(size))
    numbers = [hvd.rank_op, hvd.size_op, hvd.local_rank_op, hvd.local_size_op, hvd.process_set_included_op]
    for found in each_way(lambda: [number() for number in numbers]):
        assert [int(n) for n in found] == [rank, size, hvd.local_rank(), hvd.local_size(), 1]
    first = hvd.add_process_set([0])
    if rank == 0:
        same(function(lambda x: hvd.allreduce(x, process_set=first))(tf.constant([3.0])), [3.0])
    assert int(hvd.process_set_included_op(first.process_set_id)) == (rank == 0)

    # In a set that leaves rank 0 out, while rank 0 works with all others in another way.
    tail = hvd.add_process_set(list(range(1, size)))
    if rank > 0:
        members, me = np.arange(1, size), rank - 1
        own = tf.fill([size - 1, 2], float(rank))
        for call, wanted in [
            (lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=tail), members.sum()),
            (lambda x: hvd.allreduce(x, process_set=tail), members.mean()),
            (lambda x: hvd.grouped_allreduce([x, 2 * x], process_set=tail)[1], 2 * members.mean()),
            (lambda x: hvd.broadcast(x, size - 1, process_set=tail), size - 1),
            (lambda x: hvd.allgather(x[:1], process_set=tail), members[:, None]),
            (lambda x: hvd.grouped_allgather([x, x[:1]], process_set=tail)[1], members[:, None]),
            (lambda x: hvd.alltoall(x, process_set=tail), members[:, None]),
            (lambda x: hvd.alltoall(x, [1] * (size - 1), process_set=tail)[0], members[:, None]),
            (lambda x: hvd.reducescatter(x, op=hvd.Sum, process_set=tail), members.sum()),
            (lambda x: hvd.grouped_reducescatter([x, x], process_set=tail)[0], members.mean()),
        ]:
            for found in each_way(call, own):
                same(found, np.broadcast_to(wanted, found.shape))
        for found in each_way(lambda x: gradient(lambda x: hvd.allreduce(x, process_set=tail), x), own):
            same(found, np.full(found.shape, (members + 1).mean()))
        for number, wanted in ((hvd.rank_op, rank), (hvd.size_op, size - 1)):
            ids = {} if number is hvd.rank_op else {"process_set_id": tail.process_set_id}
            assert [int(n) for n in each_way(lambda number=number, ids=ids: number(**ids))] == [wanted] * 3
        table = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([me]), tf.constant([size - 1, 2]))
        same(
            tf.convert_to_tensor(hvd.allreduce(table, process_set=tail)),
            np.full((size - 1, 2), 1 / (size - 1)),
        )
    else:
        with pytest.raises(ValueError, match="not a member"):
            hvd.allgather(tf.ones([1]), process_set=tail)
    hvd.remove_process_set(tail)

    # Errors reach every rank and leave it usable.
    with pytest.raises(hvd.MismatchError):
        hvd.allreduce(tf.zeros([rank + 1]), name="different")
    with pytest.raises(tf.errors.OpError, match="MismatchError"):
        function(lambda x: hvd.allreduce(x, name="different"))(tf.zeros([rank + 1]))
    good, bad = tf.ones([2]), [[1.0], [2.0, 3.0]]
    x = bad if rank == 0 else good
    fp16 = hvd.Compression.fp16
    mixed = [tf.constant(1), *[tf.constant(1, tf.int64)] * (size - 1)]
    for call, told in [
        (lambda: hvd.allreduce(x), "non-rectangular"),
        (lambda: hvd.allreduce(x, compression=fp16), "non-rectangular"),
        (lambda: hvd.grouped_allreduce([good, x]), "non-rectangular"),
        (lambda: hvd.reducescatter(x), "non-rectangular"),
        (lambda: hvd.grouped_reducescatter([good, x]), "non-rectangular"),
        (lambda: hvd.allgather(x), "non-rectangular"),
        (lambda: hvd.grouped_allgather([good, x]), "non-rectangular"),
        (lambda: hvd.broadcast(x, 0), "non-rectangular"),
        (lambda: hvd.alltoall(x), "non-rectangular"),
        (lambda: hvd.alltoall(tf.ones([size]), x if rank == 0 else [1] * size), "splits"),
        (lambda: hvd.alltoall(tf.ones([size]), mixed if rank == 0 else [1] * size), "splits"),
        (lambda: hvd.alltoall(tf.ones([size]), [1.0 if rank == 0 else 1] * size), "splits"),
        (lambda: hvd.allreduce(slices, op=hvd.Min if rank == 0 else hvd.Sum), "IndexedSlices"),
        (lambda: hvd.allreduce(slices, op=99 if rank == 0 else hvd.Sum), "99"),
    ]:
        with pytest.raises(ValueError, match=f"(?s)rank 0.*{told}|{told}.*rank 0"):
            call()
    with pytest.raises(ValueError, match="rank 0: variable 1: "):
        hvd.broadcast_variables([a, bad if rank == 0 else b], root_rank=0)
    with pytest.raises(hvd.HvdpError, match="99") as held:  # and with it what the call has left behind
        hvd.broadcast_([a, b], root_rank=99, name="again")
    hvd.broadcast_([a, b], root_rank=0, name="again")
    del held
    with pytest.raises(hvd.MismatchError, match="missing on rank"):
        hvd.broadcast_variables([a, b] if rank == 0 else [a], root_rank=0)
    same(hvd.allreduce(tf.constant(1.0)), 1)
    if rank < size - 1:  # The last rank has joined, and does not count.
        dense = tf.convert_to_tensor(hvd.allreduce(slices))
        same(dense[: size - 1, 0], np.arange(size - 1, 0, -1) / (size - 1))
    joined_last = hvd.join()
    assert 0 <= joined_last < size


def rank_rows(size: int) -> int:
    return 2


@pytest.mark.parametrize("size", [2, 3])
def test_collectives(size: int) -> None:
    run_ranks(_cases, size, env=QUIET, timeout=100)
