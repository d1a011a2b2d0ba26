"""Runs the Triton kernels: on a GPU where there is one, else in Triton's interpreter, on CPU tensors."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton import knobs
from triton.runtime import interpreter

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
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies the bits of bfloat16, and all else in float32, where numpy may round by a row's place.

    It does on some processors. In float64 the products of 16-bit numbers are exact, and what their sums differ by is
    lost when they are rounded: so a row does not depend on the others, as on a GPU.
    """

    def numbers(handle: Any) -> np.ndarray:
        kind = handle.dtype.scalar
        if kind.name == "bf16":
            return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if kind.primitive_bitwidth == 8:
            half = interpreter._convert_float(handle.data, kind, interpreter.tl.float16, None)
            return half.view(np.float16).astype(np.float64)
        return handle.data.astype(np.float64)

    def create_dot(_: Any, a: Any, b: Any, acc: Any, *_options: Any) -> Any:
        sums = np.matmul(numbers(a), numbers(b)) + acc.data
        return interpreter.TensorHandle(sums.astype(acc.data.dtype), acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter makes integers of arrays with one number, which numpy no longer does."""
    plain = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


@pytest.fixture(autouse=True)
def language(monkeypatch: pytest.MonkeyPatch, loop_bounds: None) -> Iterator[None]:
    """The interpreter replaces the language's functions at each call of a kernel, and of a function in one.

    Replacing them once for a test, and looking numpy's types up by name, saves a third of its time.
    """
    if not knobs.runtime.interpret:
        yield
        return
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    monkeypatch.setattr(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope())
    of_kind, by_name = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type(kind: Any) -> Any:
        if kind.name not in by_name:
            by_name[kind.name] = of_kind(kind)
        return by_name[kind.name]

    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_type)
    yield
    scope.restore()


@pytest.fixture(autouse=True)
def roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts off what bfloat16 does not hold, and forgets to carry in fp8: round as a GPU does."""
    plain = interpreter._convert_float
    types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}

    def convert(numbers: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source.name not in types or target.name not in types:
            return plain(numbers, source, target, rounding)
        converted = torch.from_numpy(numbers.copy()).view(types[source.name]).to(types[target.name])
        return converted.view(getattr(torch, f"uint{8 * converted.itemsize}")).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture(scope="session")
def tiny_engines(tmp_path_factory: pytest.TempPathFactory) -> TinyEngines:
    """Engines for the interpreter, each made at its first use."""
    return TinyEngines(tmp_path_factory.mktemp("tiny"))
