"""The ledger's number is what an engine process takes, within a tenth."""

# Short: the measurement itself is the bench's.

from collections.abc import Callable
from pathlib import Path

from bench.ledger import measure_apart
from bench.random_encoders import MODULES, add_modules, save_encoder


def test_a_process_takes_what_is_reserved_for_it(tiny_model: Callable[..., Path]) -> None:
    """A small model is mostly the process itself, and its cache."""
    found = measure_apart(tiny_model("llama"), kv_cache_gib=0.02)
    assert 0.9 < found["taken"] / found["reserved"] < 1.0, found


def test_so_does_the_process_of_an_encoder(tmp_path: Path) -> None:
    found = measure_apart(add_modules(save_encoder(tmp_path, "bert"), *MODULES["bert"]), kv_cache_gib=0.0)
    assert 0.9 < found["taken"] / found["reserved"] < 1.0, found
