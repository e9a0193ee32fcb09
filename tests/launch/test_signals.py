"""However the launcher ends, its ranks end with it."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

READY = "child = subprocess.Popen(['sleep', '300'])\nprint('ready', flush=True)\n"
POLITE = READY + "blocked()"
DEAF = (
    "for n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)\n"
    + READY
    + "while True: blocked()"
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("body", [POLITE, DEAF], ids=["polite", "deaf"])
def test_signals_end_everything(start, how, gone, number: signal.Signals, body: str) -> None:
    running = start(body, flags=how)
    running.wait_for("ready", 2)
    family = running.family()
    assert len(family) >= 4
    sent = running.send(number)
    assert running.end() == 128 + number
    assert time.monotonic() - sent < 5
    assert running.err[-1] == f"hvdprun: stopped by {number.name}; all 2 ranks have ended"
    assert gone(family, 0) == []


def test_an_interrupted_job_shows_no_tracebacks(start) -> None:
    running = start("print('ready', flush=True); time.sleep(60)")
    running.wait_for("ready", 2)
    running.send(signal.SIGINT)
    assert running.end() == 130
    assert b"Traceback" not in running.stderr


def test_a_second_interrupt_kills_at_once(start) -> None:
    running = start(DEAF)
    running.wait_for("ready", 2)
    sent = running.send(signal.SIGINT)
    # Two equal signals that arrive together are one, so let the first be seen.
    time.sleep(0.3)
    running.send(signal.SIGINT)
    assert running.end() == 130
    assert time.monotonic() - sent < 2


def test_ranks_may_clean_up_when_interrupted(start, how) -> None:
    body = """
try:
    print('ready', flush=True)
    time.sleep(60)
finally:
    print('saved', rank, flush=True)
"""
    running = start(body, flags=how)
    running.wait_for("ready", 2)
    running.send(signal.SIGINT)
    assert running.end() == 130
    assert running.stdout.count(b"saved") == 2


@pytest.mark.parametrize("body", [POLITE, DEAF], ids=["polite", "deaf"])
def test_killing_the_launcher_leaves_nothing(start, how, gone, body: str) -> None:
    running = start(body, flags=how)
    running.wait_for("ready", 2)
    family = running.family()
    running.send(signal.SIGKILL)
    # Whoever waits for the launcher's output to end is not kept waiting.
    assert running.end() == -signal.SIGKILL
    assert gone(family, 5) == []


def test_a_waiting_launcher_costs_nothing(start, how) -> None:
    running = start(POLITE, flags=how)
    running.wait_for("ready", 2)
    watched = [p for p in (psutil.Process(running.process.pid), *running.family()) if "sleep" not in p.name()]
    before = [p.cpu_times() for p in watched]
    time.sleep(1)
    after = [p.cpu_times() for p in watched]
    used = [b.user + b.system - a.user - a.system for a, b in zip(before, after, strict=True)]
    assert sum(used) < 0.05
    running.send(signal.SIGTERM)
    running.end()
