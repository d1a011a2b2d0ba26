"""The ledger: what is reserved is never given twice."""

import random
from dataclasses import replace

import pytest

from model_runner.model_needs import ModelNeeds
from server.models.ledger import Ledger, Ledgers, host_budget

NEEDS = ModelNeeds("cpu", 1000, *(0,) * 10)


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    ledger = Ledger(100)
    assert ledger.reserve("a", 60)
    assert not ledger.reserve("b", 41)
    assert (ledger.reserved, ledger.free) == ({"a": 60}, 40)
    assert ledger.reserve("b", 40)
    ledger.release("a")
    assert (ledger.reserved, ledger.used, ledger.free) == ({"b": 40}, 40, 60)


@pytest.mark.parametrize("num_bytes", [1, -1])
def test_mistakes_are_errors(num_bytes: int) -> None:
    ledger = Ledger(100)
    ledger.reserve("a", 1)
    with pytest.raises(ValueError, match="a has reserved 1 bytes already" if num_bytes > 0 else "b wants -1"):
        ledger.reserve("a" if num_bytes > 0 else "b", num_bytes)


def test_random_turns_never_exceed_the_budget() -> None:
    turns, ledger, expected = random.Random(1), Ledger(1000), {}
    for _ in range(2000):
        name, size = turns.choice("abcdefgh"), turns.randrange(500)
        if name in expected:
            ledger.release(name)
            del expected[name]
        elif ledger.reserve(name, size):
            expected[name] = size
        else:
            assert size > 1000 - sum(expected.values())
        assert ledger.reserved == expected
        assert ledger.used <= 1000


def test_a_budget_by_default_leaves_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.models.ledger.free_memory", lambda: 4 << 30)
    assert 0.9 < host_budget() / (4 << 30) < 0.95
    assert Ledgers(None).budgets == {"cpu": host_budget()}
    monkeypatch.setattr("server.models.ledger.free_memory", lambda: 1000)
    assert host_budget() == 0


def test_each_device_has_its_own_ledger_once_a_plan_finds_it() -> None:
    ledgers = Ledgers(None)
    on_cpu, on_gpu = (replace(NEEDS, device=device) for device in ("cpu", "cuda:0"))
    assert ledgers.of(on_gpu).budget == 920
    assert ledgers.of(replace(on_gpu, free_bytes=5)) is ledgers.of(on_gpu) is not ledgers.of(on_cpu)
    assert ledgers.budgets["cuda"] == 920
    assert Ledgers(7).budgets == {"cpu": 7, "cuda": 7}
    assert Ledgers(7).of(on_gpu).budget == 7
