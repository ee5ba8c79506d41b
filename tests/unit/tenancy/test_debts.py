from __future__ import annotations

import pytest

from kvferry.tenancy.shares.debts import Debts, dead_band_ms

WEIGHTS = {"a": 4.0, "b": 1.0}


def test_the_dead_band_grows_with_workers_turns_tenants_and_the_weight() -> None:
    assert dead_band_ms(250.0, 2, 4.0, 2, 5.0) == 2000.0
    assert dead_band_ms(250.0, 32, 4.0, 2, 5.0) == 31 * 250.0
    assert dead_band_ms(500.0, 32, 4.0, 2, 5.0) == 31 * 500.0
    assert dead_band_ms(250.0, 32, 8.0, 8, 16.0) == 31 * 250.0 * 4
    assert dead_band_ms(250.0, 32, 1.0, 8, 16.0) < dead_band_ms(250.0, 32, 8.0, 8, 16.0)


def test_only_differences_beyond_the_dead_band_are_corrected() -> None:
    debts = Debts(250.0)
    debts.elsewhere({"b": 2000.0}, WEIGHTS, 2, 0.0)  # a lacks 1600 ms
    assert (debts.factor("a"), debts.factor("b")) == (1.0, 1.0)
    debts.elsewhere({"b": 1000.0}, WEIGHTS, 2, 0.0)
    assert (debts.factor("a"), debts.factor("b")) == (0.25, 4.0)
    assert debts.factor("unknown") == 1.0


def test_usage_by_shares_makes_no_debts() -> None:
    debts = Debts(250.0)
    for _ in range(50):
        debts.elsewhere({"a": 4000.0, "b": 1000.0}, WEIGHTS, 2, 0.0)
    assert debts.largest_of_band == 0.0


def test_only_tenants_that_wait_here_are_compared() -> None:
    debts = Debts(250.0)
    debts.elsewhere({"other": 1e6, "b": 1e6}, {"b": 1.0}, 2, 0.0)
    assert debts.largest_of_band == 0.0
    debts.elsewhere({"other": 1e6, "b": 1e6}, {}, 2, 0.0)
    assert debts.factor("b") == 1.0


def test_debts_are_capped_above_the_dead_band() -> None:
    debts = Debts(250.0)
    debts.elsewhere({"b": 1e9}, WEIGHTS, 2, 0.0)
    assert debts.largest_of_band == 2.0


def test_debts_are_settled_by_what_was_charged_beyond_the_time() -> None:
    debts = Debts(250.0)
    debts.elsewhere({"b": 3000.0}, WEIGHTS, 2, 0.0)  # b got 2400 ms too much
    debts.settle("b", 3 * 100.0)
    assert debts.factor("b") == 4.0
    debts.settle("b", 3 * 100.0)
    assert debts.factor("b") == 1.0
    debts.settle("unknown", 5.0)


def test_debts_decay_and_are_forgotten() -> None:
    debts = Debts(250.0)
    debts.elsewhere({"b": 1e6}, WEIGHTS, 2, 0.0)
    debts.elsewhere({}, WEIGHTS, 2, 30.0)
    assert debts.largest_of_band == pytest.approx(2.0 / 2.718281828)
    assert debts.factor("b") == 1.0
    debts.elsewhere({}, {}, 2, 400.0)
    assert repr(debts) == "<Debts of 0 tenants, up to 0.00 dead bands>"


def test_a_clock_that_goes_back_changes_nothing() -> None:
    debts = Debts(250.0)
    debts.elsewhere({"b": 3000.0}, WEIGHTS, 2, 10.0)
    debts.elsewhere({}, WEIGHTS, 2, 5.0)
    assert debts.factor("b") == 4.0
