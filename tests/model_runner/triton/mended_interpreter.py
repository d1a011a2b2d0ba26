"""Triton's interpreter as the tests need it: products and roundings of a GPU, numpy of today, and faster calls."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}


def mend(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Mend the interpreter until the patches are undone. Returns what to call before they are."""
    patch.setattr(interpreter.InterpreterBuilder, "create_dot", _create_dot)
    _patch_loop_bounds(patch)
    restore = _patch_language(patch) if knobs.runtime.interpret else lambda: None
    _patch_roundings(patch)
    return restore


def _create_dot(_: Any, a: Any, b: Any, acc: Any, *_options: Any) -> Any:
    """Products of 16-bit numbers in float64.

    The interpreter multiplies the bits of bfloat16, and all else in float32, where numpy may round by a row's place. It
    does on some processors. In float64 the products are exact, and what their sums differ by is lost when they are
    rounded: so a row does not depend on the others, as on a GPU.
    """
    sums = np.matmul(_numbers(a), _numbers(b)) + acc.data
    return interpreter.TensorHandle(sums.astype(acc.data.dtype), acc.dtype.scalar)


def _numbers(handle: Any) -> np.ndarray:
    kind = handle.dtype.scalar
    if kind.name == "bf16":
        return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind.primitive_bitwidth == 8:
        half = interpreter._convert_float(handle.data, kind, interpreter.tl.float16, None)
        return half.view(np.float16).astype(np.float64)
    return handle.data.astype(np.float64)


def _patch_loop_bounds(patch: pytest.MonkeyPatch) -> None:
    """The interpreter makes integers of arrays with one number, which numpy no longer does."""
    plain = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    patch.setattr(interpreter, "_patch_lang_tensor", patched)


def _patch_language(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The interpreter replaces the language's functions at each call of a kernel, and of a function in one.

    Replacing them once, and looking numpy's types up by name, saves a third of its time.
    """
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    patch.setattr(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope())
    of_kind, by_name = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type(kind: Any) -> Any:
        if kind.name not in by_name:
            by_name[kind.name] = of_kind(kind)
        return by_name[kind.name]

    patch.setattr(interpreter, "_get_np_dtype", numpy_type)
    return scope.restore


def _patch_roundings(patch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts off what bfloat16 does not hold, and forgets to carry in fp8: round as a GPU does."""
    plain = interpreter._convert_float

    def convert(numbers: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source.name not in _TYPES or target.name not in _TYPES:
            return plain(numbers, source, target, rounding)
        converted = torch.from_numpy(numbers.copy()).view(_TYPES[source.name]).to(_TYPES[target.name])
        return converted.view(getattr(torch, f"uint{8 * converted.itemsize}")).numpy()

    patch.setattr(interpreter, "_convert_float", convert)
