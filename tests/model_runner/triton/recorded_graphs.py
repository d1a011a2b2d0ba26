"""CUDA graphs without CUDA: what ran at the capture runs again, on the same tensors, whatever Python would do now."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

Result = TypeVar("Result")

_aten = torch.ops.aten
_WAITING = {
    _aten.item.default,
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.unique_consecutive.default,
    _aten._unique2.default,
}
"""Operations that wait for the device, which captures do not allow; indexing with booleans is another."""
_READERS = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy")}
"""Tensor methods that read from the device, which captures do not allow."""
_NO_TOKEN = 1 << 40


class _Recorder(TorchDispatchMode):
    """Notes every operation of torch, and every launch of a kernel, with the tensors that it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.replays: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_mask = func is _aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        if func in _WAITING or is_mask:
            raise RuntimeError(f"{func} waits for the device in a capture")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.replays.append(lambda: _put(func(*args, **kwargs), result))
        return result

    def launch(self, kernel: Any, run: Any, args: Any, kwargs: Any) -> None:
        def again() -> None:
            with _disable_current_modes(), pytest.MonkeyPatch.context() as patch:
                for name, method in _READERS.items():
                    patch.setattr(torch.Tensor, name, method)
                run(kernel, *args, **kwargs)

        again()
        self.replays.append(again)


def _put(new: Any, old: Any) -> None:
    """Write what an operation returns now to where its result was at the capture."""
    if isinstance(old, torch.Tensor):
        if new.data_ptr() != old.data_ptr():
            old.copy_(new)
    elif isinstance(old, list | tuple):
        for each_new, each_old in zip(new, old, strict=True):
            _put(each_new, each_old)


def _refuse(*_: Any) -> None:
    raise RuntimeError("reading a tensor waits for the device in a capture")


def _tensors(result: Any) -> list[torch.Tensor]:
    """All in what a capture returned."""
    if isinstance(result, torch.Tensor):
        return [result]
    if is_dataclass(result):
        result = [getattr(result, field.name) for field in fields(result)]
    inner = result.values() if isinstance(result, Mapping) else result
    return [tensor for each in inner for tensor in _tensors(each)]


class RecordedGraphs:
    """A GraphMaker. What a graph returned is spoilt where another may take its memory: one that was captured before."""

    def __init__(self) -> None:
        self.num_replays = 0
        self._outputs: list[list[torch.Tensor]] = []

    def capture(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        recorder, plain = _Recorder(), InterpretedFunction.run

        def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
            recorder.launch(kernel, plain, args, kwargs)

        with pytest.MonkeyPatch.context() as patch, recorder:
            patch.setattr(InterpretedFunction, "run", launch)
            for name in _READERS:
                patch.setattr(torch.Tensor, name, _refuse)
            result = run()

        self._outputs.append(_tensors(result))
        index = len(self._outputs)

        def replay() -> None:
            self.num_replays += 1
            for output in (tensor for outputs in self._outputs[index:] for tensor in outputs):
                output.fill_(torch.nan if output.is_floating_point() else _NO_TOKEN)
            for again in recorder.replays:
                again()

        return replay, result
