"""Ctrl-C is kept while Optuna works and raised where a trial is measured."""

from __future__ import annotations

import os
import signal

import pytest

from workbench.tuning.interrupt import Interrupts


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def test_kept_outside_and_raised_inside():
    reached = []
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        ctrl_c()
        reached.append("outside")
        with interrupts.welcome():
            reached.append("inside")
    assert reached == ["outside"]


def test_raised_at_once_inside():
    reached = []
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts, interrupts.welcome():
        ctrl_c()
        reached.append("after")
    assert reached == []


def test_raised_at_the_end_if_no_one_asked_and_handler_restored():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupts():
        ctrl_c()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_is_not_hidden_by_a_kept_interrupt():
    with pytest.raises(ValueError, match="real"), Interrupts():
        ctrl_c()
        raise ValueError("real")
