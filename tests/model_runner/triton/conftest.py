"""Runs the Triton kernels: on a GPU where there is one, else in Triton's interpreter, on CPU tensors."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.model_runner.triton.mended_interpreter import mend
from tests.model_runner.triton.tiny_engines import TinyEngines


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With a GPU, those tests of this folder that run there are among those that `-m gpu` asks for."""
    if torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent) and "device" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter rounds and multiplies as a GPU does."""
    restore = mend(monkeypatch)
    yield
    restore()


@pytest.fixture(scope="session")
def tiny_engines(tmp_path_factory: pytest.TempPathFactory) -> TinyEngines:
    """Engines for the interpreter, each made at its first use."""
    return TinyEngines(tmp_path_factory.mktemp("tiny"))
