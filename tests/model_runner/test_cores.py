"""How many processors may be used."""

import os
from pathlib import Path

import pytest

from model_runner.processes import available_cores


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("max 100000\n", 8),
        ("800000 100000\n", 8),
        ("1600000 100000\n", 8),
        ("400000 100000\n", 4),
        ("399999 100000\n", 3),
        ("50000 100000\n", 1),  # half a processor
        ("", 8),
    ],
)
def test_the_limit_of_the_control_group_counts(
    limit: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    file = tmp_path / "cpu.max"
    file.write_text(limit)
    assert available_cores(file) == cores


def test_without_control_groups_the_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 7})
    assert available_cores(tmp_path / "missing") == 3


def test_here() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
