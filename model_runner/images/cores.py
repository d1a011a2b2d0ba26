"""The cores that a tower on a CPU computes with, next to the steps: one while steps run, otherwise all.

A tower in more threads would hold back every core that a step computes with, and a step waits for its slowest thread.
Results do not depend on the choice. The native products' are the same in any number of threads. So are attention's in
every torch that was tried, in which one thread computes each head and group of queries. That is tried again before
attention uses more than one thread. All else always runs in one thread.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from model_runner.kernels.library import Kernels, NativeWeight
from model_runner.native.packer import NativePacker
from model_runner.weights.matrix import DenseMatrix, Linear
from model_runner.weights.packed_weight import NativeProduct, PackedWeight

logger = logging.getLogger("samewise.runner")

_TRIED_PLACES = 600
"""Places of an image with which attention is tried."""
_QUIET_S = 0.1
"""Without a step for this long, no request is decoded."""


class TowerCores:
    """Chooses how many threads compute. Its threads inherit the priority of the thread that computes features."""

    def __init__(self, kernels: Kernels) -> None:
        """`kernels` are copied at the first use, because steps use them."""
        self._kernels = kernels
        self._copies: dict[int, Kernels] = {}
        self._num_threads = torch.get_num_threads()
        self._others = ThreadPoolExecutor(1, "images")
        self._owner: int | None = None
        self._in_step = False
        self._last_step = -_QUIET_S
        self._shares_attention: bool | None = None
        """Whether attention has the same bits in all threads as in one; None until it is tried."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step is computed meanwhile."""
        self._in_step = True
        try:
            yield
        finally:
            self._last_step = time.monotonic()
            self._in_step = False

    def take(self) -> None:
        """Let torch use one thread in the calling thread, in which features are computed from now on."""
        if self._owner != threading.get_ident():
            self._owner = threading.get_ident()
            torch.get_num_threads()  # or torch would set the thread to the default at its first operation
            torch.set_num_threads(1)
            # The number is also the default of new threads, which this sets back.
            self._others.submit(torch.set_num_threads, self._num_threads).result()

    def multiply(self, weight: NativeWeight, rows: Tensor) -> Tensor:
        """Rows [n, inputs] -> [n, outputs]."""
        threads = self._kernels.threads if self._has_all else 1
        if threads not in self._copies:
            self._copies[threads] = self._kernels.copy(threads)
        return self._copies[threads].linear(weight, rows)

    def attend(self, function: Callable[..., Tensor], arguments: Any, keywords: Any) -> Tensor:
        """Call torch's attention."""
        if not self._has_all:
            return _call(function, arguments, keywords)
        if self._shares_attention is None:
            self._shares_attention = self._is_exact(function, arguments[0])
        return (self._in_all_threads if self._shares_attention else _call)(function, arguments, keywords)

    def _in_all_threads(self, function: Callable[..., Tensor], arguments: Any, keywords: Any) -> Tensor:
        return self._others.submit(_call, function, arguments, keywords).result()

    def _is_exact(self, function: Callable[..., Tensor], query: Tensor) -> bool:
        """Whether attention has the same bits in all threads as in one, with the heads and type of this query."""
        heads, width = query.shape[1], query.shape[-1]
        drawn = torch.randn(3, 1, _TRIED_PLACES, heads, width, generator=torch.Generator().manual_seed(0))
        tried = tuple(drawn.to(query.dtype).transpose(2, 3))
        is_exact = torch.equal(_call(function, tried, {}), self._in_all_threads(function, tried, {}))
        if not is_exact:
            logger.warning("images     attention depends on the number of threads in this torch, so it uses one")
        return is_exact

    @property
    def _has_all(self) -> bool:
        return not self._in_step and time.monotonic() - self._last_step > _QUIET_S


def _call(function: Callable[..., Tensor], arguments: Any, keywords: Any) -> Tensor:
    with torch.inference_mode():  # which each thread has to enter
        return function(*arguments, **keywords)


class SharedAttention(TorchFunctionMode):
    """Lets the calling thread's attention use the cores that are free."""

    def __init__(self, cores: TowerCores) -> None:
        super().__init__()
        self._cores = cores

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function of torch but attention runs as it is."""
        if func is F.scaled_dot_product_attention:
            return self._cores.attend(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def linears_of(model: nn.Module) -> list[nn.Linear]:
    """The layers of a tower whose weights are packed; subclasses read their weights in ways of their own."""
    return [module for module in model.modules() if type(module) is nn.Linear]


def pack_tower(model: nn.Module, packer: NativePacker, cores: TowerCores) -> None:
    """Replace the weights of a tower's linear layers by packed ones."""

    def pack(weight: Tensor) -> NativeProduct:
        return NativeProduct(cores.multiply, packer.pack(Linear([DenseMatrix(weight)])))

    for linear in linears_of(model):
        weight = linear.weight
        del linear.weight
        linear.weight = PackedWeight(weight.data, pack)
