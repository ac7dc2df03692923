"""Tests for signal handlers. tests/faults tests signals to the full command."""

import os
import signal

import pytest

from qkv.training.distributed import SignalInterrupt, raise_on_stop_signals, record_stop_signals


def test_a_signal_inside_the_loop_is_recorded():
    before = signal.getsignal(signal.SIGTERM)
    with record_stop_signals() as stop:
        assert stop.signal is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal is signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # a second signal kills the process
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_outside_the_loop_raises_signal_interrupt():
    with pytest.raises(SignalInterrupt, match="SIGINT"), raise_on_stop_signals():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
