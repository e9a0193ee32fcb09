"""The casts of 16-bit floats: NumPy's own values, whoever lends them, and as fast for all of them."""

from __future__ import annotations

import hashlib
import math
import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import hvdp as hvd
from hvdp._core import casts
from hvdp._core.kernels import reduce_into
from hvdp._core.ops import Average, Max, Reduction, Sum
from hvdp.testing import World, worlds
from hvdp.torch import _kernels

FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
EVERY = np.arange(1 << 16, dtype=np.uint16)


def _own() -> tuple[casts.Cast, casts.Cast]:
    return casts._widen_float16, casts._narrow_float16


def _torchs() -> tuple[casts.Cast, casts.Cast]:
    return _kernels._cast, _kernels._cast


def _hard_to_round() -> Any:
    """Every float16, what lies just beside it and half-way to the next; subnormals, and everything."""
    exact = EVERY.view(np.float16).astype(np.float32).view(np.uint32)
    steps = (0, 1, 0xFFFFFFFF, 0x0FFF, 0x1000, 0x1001, 0xFFFFF000, 0xFFFFEFFF)
    halves = (np.arange(1, 2048) * 2.0**-25).astype(np.float32).view(np.uint32)
    anything = np.random.default_rng(1).integers(0, 1 << 32, 1 << 18).astype(np.uint32)
    beside = [numbers + np.uint32(step) for numbers in (exact, halves) for step in steps]
    return np.concatenate([*beside, anything]).view(np.float32)


def _in_pieces(cast: casts.Cast, source: Any, target: Any, count: int) -> None:
    for start in range(0, source.size, count):
        cast(source[start : start + count], target[start : start + count])


@pytest.mark.parametrize("whose", [_own, _torchs])
@pytest.mark.parametrize("count", [1000, 32_767, 65_536])
def test_float16_is_cast_as_numpy_casts_it(whose: Any, count: int) -> None:
    widen, narrow = whose()
    source, wide = EVERY.view(np.float16), np.empty(EVERY.size, np.float32)
    _in_pieces(widen, source, wide, count)
    np.testing.assert_array_equal(wide, source.astype(np.float32))
    numbers = _hard_to_round()
    found = np.empty(numbers.size, np.float16)
    _in_pieces(narrow, numbers, found, count)
    with np.errstate(all="ignore"):
        wanted = numbers.astype(np.float16)
    true = ~np.isnan(numbers)
    np.testing.assert_array_equal(found.view(np.uint16)[true], wanted.view(np.uint16)[true])


def test_subnormals_survive_where_the_processor_flushes_them() -> None:
    """As some libraries have it, for the whole process."""
    subnormal = EVERY & 0x7C00 == 0
    _check_flushed(EVERY[subnormal].view(np.float16))
    few = np.ones(1 << 16, np.float16)
    few[1::2048] = EVERY[subnormal].view(np.float16)[::64]
    _check_flushed(few)


def _check_flushed(small: Any) -> None:
    wanted, out = small.astype(np.float32), np.empty_like(small)
    widen, narrow = _own()
    wide = np.empty(small.size, np.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush")
    try:
        widen(small, wide)
        narrow(wide, out)
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(wide, wanted)
    np.testing.assert_array_equal(out.view(np.uint16), small.view(np.uint16))


@pytest.mark.parametrize("dtypes", [(np.float32, FLOAT16), (np.float64, FLOAT16), (np.float32, BFLOAT16)])
def test_compression_rounds_as_numpy_does(dtypes: Any) -> None:
    wide, narrow = dtypes
    compressor = hvd.Compression.fp16 if narrow == FLOAT16 else hvd.Compression.bf16
    numbers = _hard_to_round()
    numbers = numbers[~np.isnan(numbers)].astype(wide)
    with np.errstate(all="ignore"):
        wanted = numbers.astype(narrow)
    for shape in ((), (0, 3), (5, 7), (2, 100_001)):
        for layout in (
            lambda array: array,
            np.transpose,
            lambda array: array[..., ::2] if array.ndim else array,
        ):
            mine = layout(numbers[: math.prod(shape)].reshape(shape))
            small, context = compressor.compress(mine)
            rounded = layout(wanted[: math.prod(shape)].reshape(shape))
            np.testing.assert_array_equal(small.view(np.uint16), rounded.view(np.uint16), strict=True)
            np.testing.assert_array_equal(
                compressor.decompress(small, context), rounded.astype(wide), strict=True
            )


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("op", [Sum, Average, Max], ids=lambda op: op.name)
def test_lent_casts_give_the_same_bits(op: Any, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not-a-numbers of all kinds among them: a rank with torch and one without must not differ."""
    random = np.random.default_rng(ranks)
    sources = [
        EVERY.view(np.float16),
        *(random.permutation(EVERY).view(np.float16) for _ in range(ranks - 1)),
    ]
    found = []
    monkeypatch.setitem(casts._casts, FLOAT16, casts._casts[FLOAT16])  # put back in the end
    for whose in (_own, _torchs):
        casts.lend_casts(FLOAT16, *whose())
        for count in (EVERY.size, 1001):
            out = np.empty(EVERY.size, np.float16)
            with np.errstate(all="ignore"):
                for start in range(0, out.size, count):
                    part = slice(start, start + count)
                    reduce_into(out[part], [s[part] for s in sources], Reduction(op, ranks, 1.0, 0.5))
            found.append(out.tobytes())
    assert found == [found[0]] * 4
    assert np.isnan(np.frombuffer(found[0], np.float16)).any()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _count_threads() -> list[int]:
    """Ahead, after a cast by pieces, and after one in whole."""
    torch.set_num_threads(4)
    source, target = np.full(1 << 20, 1.5, np.float16), np.empty(1 << 20, np.float32)
    source.flags.writeable = False
    counts = [_threads()]
    _kernels._cast(source, target)
    assert (target == 1.5).all()
    counts.append(_threads())
    torch.from_numpy(target).half()
    return [*counts, _threads()]


def test_torch_casts_in_the_calling_thread_and_reads_what_is_read_only() -> None:
    ((ahead, by_pieces, in_whole),) = World("shm", 1).run(_count_threads)
    assert by_pieces == ahead
    assert in_whole > ahead, "torch would not have started threads anyhow"


def _some_with_torch() -> tuple[bool, list[str]]:
    """Even ranks have torch's casts, odd ones the core's."""
    hvd.init()
    rank = hvd.rank()
    if rank % 2 == 0:
        import hvdp.torch  # noqa: F401
    random = np.random.default_rng(rank)
    digests = []
    with np.errstate(all="ignore"):
        for count in (7, 1001, 20_000, 300_001):
            for dtype in (FLOAT16, BFLOAT16):
                mine = (random.normal(size=count) * 10.0 ** random.integers(-8, 5, count)).astype(dtype)
                mine[::97] = np.nan
                mine[5::89] = np.inf * (-1) ** rank
                for op in (hvd.Sum, hvd.Average, hvd.Max):
                    result = hvd.allreduce(mine, op=op, prescale_factor=3.0)
                    digests.append(hashlib.sha256(result.tobytes()).hexdigest())
    lent = casts._casts[FLOAT16][0] is not casts._widen_float16
    return lent, digests


@pytest.mark.parametrize("world", worlds(shm=(3,), mpi=(2,)), ids=str)
def test_ranks_with_and_without_torch_agree_to_the_last_bit(world: World) -> None:
    found = world.run(_some_with_torch, warm=False)
    assert [lent for lent, _ in found] == [rank % 2 == 0 for rank in range(world.size)]
    assert [digests for _, digests in found] == [found[0][1]] * world.size
