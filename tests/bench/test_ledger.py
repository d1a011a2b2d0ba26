"""The ledger's number is what an engine process takes, within a tenth."""

# Short: the measurement itself is the bench's.

from collections.abc import Callable
from pathlib import Path

from bench.ledger import measure_apart


def test_a_process_takes_what_is_reserved_for_it(tiny_model: Callable[..., Path]) -> None:
    """A small model is mostly the process itself, and its cache."""
    found = measure_apart(tiny_model("llama"), kv_cache_gib=0.02)
    assert 0.9 < found["taken"] / found["reserved"] < 1.0, found
