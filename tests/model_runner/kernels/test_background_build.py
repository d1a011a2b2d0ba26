"""Libraries that are built while other work goes on."""

import threading
from pathlib import Path

import pytest

from model_runner.kernels import background_build
from model_runner.kernels.background_build import build_early, kernels_library, suffix_library
from model_runner.kernels.build import NoKernelsError


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that build, where a build returns the folder."""
    names: list[str] = []

    def build_kernels(folder: Path) -> Path:
        names.append(f"kernels {threading.current_thread().name}")
        return folder / "kernels"

    def build_suffix(folder: Path) -> Path:
        names.append(f"suffix {threading.current_thread().name}")
        return folder / "suffix"

    monkeypatch.setattr(background_build, "build_kernels", build_kernels)
    monkeypatch.setattr(background_build, "build_suffix", build_suffix)
    return names


@pytest.mark.parametrize(
    ("device", "has_gpu", "begun"),
    [
        ("cpu", False, ["kernels", "suffix"]),
        ("cpu", True, ["kernels", "suffix"]),
        ("auto", False, ["kernels", "suffix"]),
        ("auto", True, ["suffix"]),
        ("cuda", True, ["suffix"]),
    ],
)
def test_what_the_device_needs_is_begun(
    device: str, has_gpu: bool, begun: list[str], built: list[str], tmp_path: Path
) -> None:
    gpu = tmp_path / "gpu"
    if has_gpu:
        gpu.touch()
    build_early(tmp_path, device, gpu)
    assert kernels_library(tmp_path) == tmp_path / "kernels"
    assert suffix_library(tmp_path) == tmp_path / "suffix"
    in_background = sorted(name.split()[0] for name in built if "MainThread" not in name)
    assert in_background == begun
    assert len(built) == 2
    assert kernels_library(tmp_path) == tmp_path / "kernels"
    assert built[-1] == "kernels MainThread", "the next one asks again"


def test_who_needs_it_waits_for_it(built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def build_slowly(folder: Path) -> Path:
        begun.set()
        may_end.wait()
        return folder

    monkeypatch.setattr(background_build, "build_kernels", build_slowly)
    build_early(tmp_path, "cpu")
    assert begun.wait(60), "building has begun before anybody asked"
    answers: list[Path] = []
    asking = threading.Thread(target=lambda: answers.append(kernels_library(tmp_path)))
    asking.start()
    assert answers == []
    may_end.set()
    asking.join()
    assert answers == [tmp_path]


def test_errors_are_raised_where_it_is_needed(
    built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> Path:
        raise NoKernelsError("no C++ compiler was found")

    monkeypatch.setattr(background_build, "build_kernels", fail)
    build_early(tmp_path, "cpu")
    with pytest.raises(NoKernelsError, match=r"no C\+\+ compiler"):
        kernels_library(tmp_path)


def test_without_threads_it_is_built_when_it_is_needed(
    built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    build_early(tmp_path, "cpu")
    assert kernels_library(tmp_path) == tmp_path / "kernels"
    assert built == ["kernels MainThread"]
