"""Whom auto asks, and when it is content."""

from model_runner.contract import Speculation
from model_runner.speculative.methods import AUTO, cost_rank, is_promising, members

ALL = ("hydra", "lookahead", "prediction", "suffix")


def test_a_named_method_is_the_only_one():
    for method in ALL:
        assert members(Speculation(method, prediction=(1,)), ALL, "hydra") == (method,)


def test_auto_asks_quick_methods_and_then_heads():
    assert members(Speculation(AUTO, prediction=(1,)), ALL, "hydra") == ("prediction", "suffix", "hydra")
    assert members(Speculation(AUTO), ALL, "hydra") == ("suffix", "hydra")
    assert members(Speculation(AUTO), ALL, None) == ("suffix",)
    assert members(Speculation(AUTO, prediction=(1,)), ("lookahead", "hydra"), "hydra") == ("hydra",)
    assert members(Speculation(AUTO), ("lookahead",), "hydra") == ()


def test_turns_are_in_this_order():
    asked = members(Speculation(AUTO, prediction=(1,)), ALL, "hydra")
    assert sorted(asked, key=cost_rank) == list(asked)


def test_a_draft_is_promising_if_the_next_method_brings_no_more():
    assert is_promising(1.0, None)
    assert not is_promising(0.9, None)
    assert is_promising(0.5, 0.5)
    assert not is_promising(0.5, 0.6)
    assert not is_promising(0.0, 0.0)  # nothing is no draft
