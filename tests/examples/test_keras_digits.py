"""The Keras and TensorFlow examples, through the real launcher."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("keras", reason="Keras is not installed")

from hvdp.testing import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
LAST_LINE = re.compile(r"test accuracy (?P<accuracy>\d\.\d{4})  images/s \d+  ranks (?P<ranks>\d+)")


SCRIPTS = [("keras_digits.py", "torch"), ("keras_digits.py", "jax"), ("tensorflow_digits.py", "tensorflow")]
RUNS = [(script, backend, ranks) for script, backend in SCRIPTS for ranks in (1, 2, 4)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("script", "backend", "ranks"), [*RUNS, ("keras_digits.py", "tensorflow", 2)])
def test_it_learns_on_any_number_of_ranks(script: str, backend: str, ranks: int) -> None:
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    done = run_script(
        [sys.executable, "-m", "hvdp.launch", "-np", str(ranks), sys.executable, EXAMPLES / script],
        env={"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=200,
    )
    assert done.status == 0, done.stdout + done.stderr
    (found,) = LAST_LINE.finditer(done.stdout)
    assert float(found["accuracy"]) >= 0.97
    assert int(found["ranks"]) == ranks
