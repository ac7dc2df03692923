"""SIGINT and SIGTERM: noted inside the loop, a stop at once elsewhere; in the command itself: tests/faults."""

import os
import signal

import pytest

from qkv.training.signals import SignalInterrupt, raise_on_stop_signals, record_stop_signals


def test_inside_the_loop_a_signal_is_noted():
    before = signal.getsignal(signal.SIGTERM)
    with record_stop_signals() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal is signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # so that a second one leaves at once
    assert signal.getsignal(signal.SIGTERM) is before


def test_elsewhere_a_signal_stops_at_once():
    with pytest.raises(SignalInterrupt, match="SIGINT"), raise_on_stop_signals():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
