"""`hvdp.scaling`: the formulas, their edges, and what may not be passed."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdp
from hvdp.errors import InvalidArgumentError
from hvdp.scaling import LrScaling, scale_factor, scaled_rate, warmup_factor, warmup_rate

RULES: tuple[LrScaling | None, ...] = (None, "linear", "sqrt")

rules = st.sampled_from(RULES)
factors = st.floats(min_value=1e-3, max_value=1e6)
growths = st.floats(min_value=1.0, max_value=1e6)
epochs = st.floats(min_value=0.0, max_value=1e4)
lengths = st.floats(min_value=1e-3, max_value=1e3)
shares = st.floats(min_value=0.0, max_value=1.0)


@pytest.mark.parametrize(
    ("rule", "batch_factor", "expected"),
    [
        (None, 8, 1.0),
        ("linear", 8, 8.0),
        ("linear", 0.5, 0.5),
        ("sqrt", 16, 4.0),
        ("sqrt", 2, math.sqrt(2)),
        ("sqrt", 0.25, 0.5),
    ],
)
def test_scale_factor_is_the_formula(rule: LrScaling | None, batch_factor: float, expected: float) -> None:
    assert scale_factor(rule, batch_factor) == expected


@pytest.mark.parametrize("rule", RULES)
def test_one_process_changes_nothing(rule: LrScaling | None) -> None:
    assert scale_factor(rule, 1) == 1.0
    assert scaled_rate(0.1, rule, 1) == 0.1
    assert warmup_rate(0.1, rule, 1, progress=0.3, warmup_epochs=5) == 0.1


def test_the_published_setting_of_goyal_et_al() -> None:
    """Rate 0.1 for 256 images, 8192 images in all: 3.2 after 5 epochs of warm-up from 0.1."""
    factor = 8192 / 256
    assert scaled_rate(0.1, "linear", factor) == pytest.approx(3.2)
    assert warmup_rate(0.1, "linear", factor, progress=0, warmup_epochs=5) == pytest.approx(0.1)
    assert warmup_rate(0.1, "linear", factor, progress=2.5, warmup_epochs=5) == pytest.approx(1.65)
    assert warmup_rate(0.1, "linear", factor, progress=5, warmup_epochs=5) == pytest.approx(3.2)


@pytest.mark.parametrize(
    ("progress", "warmup_epochs", "scale", "expected"),
    [
        (0, 4, 4, 0.25),
        (1, 4, 4, 0.4375),
        (2, 4, 4, 0.625),
        (4, 4, 4, 1.0),
        (100, 4, 4, 1.0),
        (0, 0, 4, 1.0),  # no warm-up asked for
        (0, 4, 1, 1.0),  # nothing to grow into
        (0, 4, 0.5, 1.0),  # a smaller batch lowers the rate: no warm-up from a higher one
    ],
)
def test_warmup_factor_is_the_formula(
    progress: float, warmup_epochs: float, scale: float, expected: float
) -> None:
    assert warmup_factor(progress, warmup_epochs, scale) == pytest.approx(expected, rel=1e-15)


def test_a_rate_of_zero_stays_zero() -> None:
    assert scaled_rate(0.0, "linear", 64) == 0.0


def test_numpy_numbers_are_numbers() -> None:
    assert scale_factor("linear", np.int64(4)) == 4.0
    assert scaled_rate(np.float32(0.5), "sqrt", np.float64(4)) == 1.0


@given(a=factors, b=factors, rule=rules)
def test_factors_compose(a: float, b: float, rule: LrScaling | None) -> None:
    """Growing the batch in two steps is growing it once."""
    together = scale_factor(rule, a * b)
    assert together == pytest.approx(scale_factor(rule, a) * scale_factor(rule, b), rel=1e-9)


@given(factor=growths)
def test_the_rules_are_ordered(factor: float) -> None:
    factors_of_rules = [scale_factor(rule, factor) for rule in (None, "sqrt", "linear")]
    assert factors_of_rules == sorted(factors_of_rules)


@given(first=epochs, second=epochs, length=lengths, scale=growths)
def test_warmup_never_falls_and_stays_in_its_range(
    first: float, second: float, length: float, scale: float
) -> None:
    early, late = (warmup_factor(p, length, scale) for p in sorted((first, second)))
    assert 1 / scale <= early <= late * (1 + 1e-12)
    assert late <= 1 + 1e-12


@given(share=shares, length=lengths, scale=growths)
def test_warmup_is_a_straight_line(share: float, length: float, scale: float) -> None:
    expected = 1 / scale + (1 - 1 / scale) * share
    assert warmup_factor(share * length, length, scale) == pytest.approx(expected, rel=1e-9)


@given(rate=st.floats(min_value=1e-6, max_value=10), factor=growths, rule=rules)
def test_warmup_begins_at_the_rate_of_one_process(rate: float, factor: float, rule: LrScaling | None) -> None:
    assert warmup_rate(rate, rule, factor, progress=0, warmup_epochs=5) == pytest.approx(rate)


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf, "4", None, True])
def test_a_wrong_batch_factor_is_named(bad: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^batch_factor must .* Received: "):
        scale_factor("linear", bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", RULES)
def test_the_factor_is_checked_under_every_rule(rule: LrScaling | None) -> None:
    with pytest.raises(InvalidArgumentError, match=r"Received: 0$"):
        scale_factor(rule, 0)


@pytest.mark.parametrize("bad", ["square", "", "Linear", 1, False])
def test_an_unknown_rule_is_named(bad: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"lr_scaling must be .* Received: "):
        scale_factor(bad, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("progress", "warmup_epochs", "scale", "name"),
    [
        (-0.1, 5, 2, "progress"),
        (math.nan, 5, 2, "progress"),
        (0, -1, 2, "warmup_epochs"),
        (0, math.inf, 2, "warmup_epochs"),
        (0, 5, 0, "scale"),
        (0, 5, -2, "scale"),
    ],
)
def test_wrong_warmup_arguments_are_named(
    progress: float, warmup_epochs: float, scale: float, name: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^{name} must .* Received: "):
        warmup_factor(progress, warmup_epochs, scale)


def test_a_negative_rate_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^rate must not be negative\. Received: -0\.1$"):
        scaled_rate(-0.1, None, 1)


def test_it_needs_nothing_but_the_standard_library() -> None:
    # `hvdp/__init__` wires more than this module needs, so a bare package stands in for it.
    code = f"""if True:
        import sys, types
        bare = types.ModuleType("hvdp")
        bare.__path__ = {list(hvdp.__path__)!r}
        sys.modules["hvdp"] = bare
        before = set(sys.modules)
        import hvdp.scaling
        roots = {{name.partition(".")[0] for name in set(sys.modules) - before}}
        print(sorted(roots - set(sys.stdlib_module_names)))
    """
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "['hvdp']"
