"""The engine process's environment variables."""

import os
import subprocess
import sys

import pytest

from bench.engine_environment import use_engine_environment
from server.engine.environment import ENVIRONMENT, engine_environment

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_cuda_memory_is_taken_in_segments_that_grow() -> None:
    assert engine_environment()["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_says_of_the_allocator_stands_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    environment = engine_environment()
    assert {key: environment[key] for key in NAMES if key in environment} == {name: "max_split_size_mb:64"}


def test_torch_takes_the_setting_without_a_word() -> None:
    code = "import torch; torch.zeros(8).sum(); torch.cuda.is_available() and torch.zeros(8, device='cuda')"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=engine_environment(), capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_a_benchmark_that_starts_over_is_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in the working folder, in which the engine's own children look for nothing."""
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda program, command, environment: started.append(environment))
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    use_engine_environment()
    assert started[0]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "PYTHONSAFEPATH" not in started[0]
