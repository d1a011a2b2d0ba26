"""How many processors may be used."""

import os
from pathlib import Path

import pytest

from model_runner.processes import available_cores, control_groups


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
    (tmp_path / "cpu.max").write_text(limit)
    assert available_cores([tmp_path]) == cores


def test_without_control_groups_the_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 7})
    assert available_cores([tmp_path / "missing"]) == 3


@pytest.mark.parametrize(
    ("line", "folders"),
    [
        ("0::/", ["."]),
        (
            "9:name=systemd:/other\n0::/system.slice/samewise.service",
            ["system.slice/samewise.service", "system.slice", "."],
        ),
        ("0::/../neighbour", ["."]),
        ("4:memory:/version/1", ["."]),
    ],
)
def test_the_groups_of_a_process(line: str, folders: list[str], tmp_path: Path) -> None:
    (tmp_path / "own").write_text(line + "\n")
    root = tmp_path / "root"
    assert control_groups(tmp_path / "own", root) == [root / folder for folder in folders]
    assert control_groups(tmp_path / "missing", root) == [root]


def test_the_smallest_limit_of_all_groups_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    groups = [tmp_path / "a.service", tmp_path]
    groups[0].mkdir()
    for group, limit in zip(groups, ("max 100000", "300000 100000"), strict=True):
        (group / "cpu.max").write_text(limit)
    assert available_cores(groups) == 3
    (groups[0] / "cpu.max").write_text("200000 100000")
    assert available_cores(groups) == 2


def test_here() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
