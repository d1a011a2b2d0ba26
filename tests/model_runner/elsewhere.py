"""A pretended device: computes as the CPU does, and refuses what a GPU refuses, tensors of both in one operation.

For code in plain torch that serves any device, on machines that have only the CPU.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

ELSEWHERE = torch.device("cuda", 0)
_TAKE_FROM_ANYWHERE = {Tensor.__getitem__, Tensor.__setitem__, Tensor.to, Tensor.copy_}
_DEVICE, _IS_CUDA = Tensor.device.__get__, Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class _There(Tensor):
    """Stands for a tensor on the device; `here` has the numbers."""

    here: Tensor

    @staticmethod
    def __new__(cls: "type[_There]", here: Tensor) -> "_There":
        there: _There = Tensor._make_subclass(cls, here)
        there.here = here
        return there

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _Elsewhere():
            return _call(func, args, kwargs or {})


class _Elsewhere(TorchFunctionMode):
    """Makes tensors there where they are asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


@contextmanager
def elsewhere() -> Iterator[torch.device]:
    """The pretended device."""
    with _Elsewhere():
        yield ELSEWHERE


def there(tensor: Tensor) -> Tensor:
    """A copy on the device."""
    return _There(tensor.clone())


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    leaves = [*_leaves((args, kwargs))]
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    is_there = any(isinstance(one, _There) for one in tensors)
    if is_there and func in {_DEVICE, _IS_CUDA}:
        return ELSEWHERE if func == _DEVICE else True
    if is_there and func is Tensor.numpy:
        raise TypeError("a tensor on the device is no numpy array")
    is_mixed = is_there and any(not isinstance(one, _There) and one.dim() for one in tensors)
    if is_mixed and func not in _TAKE_FROM_ANYWHERE:
        raise RuntimeError(f"{func.__name__} with tensors on the CPU and on the device")
    if func is Tensor.copy_:
        is_there = isinstance(args[0], _There)
    elif func is Tensor.cpu:
        is_there = False
    for device in leaves:
        is_there = device.type == ELSEWHERE.type if isinstance(device, torch.device) else is_there
    with torch._C.DisableTorchFunction():
        result = func(*_map(args, _here), **_map(kwargs, _here))
    return _map(result, lambda one: _There(one) if is_there and isinstance(one, Tensor) else one)


def _here(one: Any) -> Any:
    if isinstance(one, _There):
        return one.here
    return torch.device("cpu") if isinstance(one, torch.device) else one


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    if isinstance(tree, tuple | list):
        for one in tree:
            yield from _leaves(one)
    else:
        yield tree


def _map(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Map a nested structure. torch's named tuples are constructed from one sequence, as plain tuples are."""
    if isinstance(tree, Mapping):
        return {name: _map(one, change) for name, one in tree.items()}
    if isinstance(tree, tuple | list):
        make = getattr(type(tree), "_make", type(tree))
        return make([_map(one, change) for one in tree])
    return change(tree)
