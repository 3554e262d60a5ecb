"""Signals to stop are noted, handed on to a launcher that waits for them, and given back."""

from __future__ import annotations

import os
import signal

import pytest

from vit3.engine.signals import REQUEUE_CODE, stop_requests


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", REQUEUE_CODE), ("SIGUSR1", REQUEUE_CODE), ("SIGINT", 130)])
def test_a_signal_is_noted_once_and_handlers_are_given_back(name, code):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with stop_requests() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), number)
        assert stop.signal == number
        stopped = stop.interrupted("everything is in x")
    assert signal.getsignal(number) is before
    assert (
        stopped.code == code == (75 if code != 130 else 130)
        and str(stopped) == f"stopped by {name}; everything is in x"
    )


def test_a_second_interrupt_stops_at_once():
    with stop_requests(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_a_launcher_gets_its_signal_after_us():
    """submitit puts a handler for SIGUSR2 that leaves the process: it has to wait until everything is saved."""
    got = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: got.append(number))
    try:
        with stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert stop.signal == signal.SIGUSR2 and got == []
            stop.hand_on()
            assert got == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_signal_to_another_process_counts_for_all():
    with stop_requests() as stop:
        stopped = stop.interrupted("saved")
        stop.hand_on()
    assert stopped.code == REQUEUE_CODE and "a signal to another process" in str(stopped)
