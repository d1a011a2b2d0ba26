"""Builds native libraries in the background, so that compilers run while Python imports modules and reads the model."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from model_runner.kernels.build import build_kernels, build_suffix

_GPU = Path("/dev/nvidiactl")

_Build = Callable[[Path], Path]
_begun: dict[tuple[_Build, Path], Future[Path]] = {}


def build_early(folder: Path, device: str, gpu: Path = _GPU) -> None:
    """Begin to look for or build the libraries that a runner on the device needs; errors are raised where it asks.

    Args:
        folder: cache folder, as for `build_kernels`.
        device: the configured device. With "auto" and a GPU, the kernels are left until the runner asks for them.
        gpu: exists if there is an NVIDIA driver.
    """
    on_cpu = device == "cpu" or (device == "auto" and not gpu.exists())
    for build in (build_kernels, build_suffix) if on_cpu else (build_suffix,):
        executor = ThreadPoolExecutor(1, "build")
        try:
            _begun[build, folder] = executor.submit(build, folder)
        except RuntimeError:  # the system gives no more threads
            return
        finally:
            executor.shutdown(wait=False)


def kernels_library(folder: Path) -> Path:
    """`build_kernels(folder)`, or the result of the build that has begun in the background."""
    return _result(build_kernels, folder)


def suffix_library(folder: Path) -> Path:
    """`build_suffix(folder)`, or the result of the build that has begun in the background."""
    return _result(build_suffix, folder)


def _result(build: _Build, folder: Path) -> Path:
    begun = _begun.pop((build, folder), None)
    return build(folder) if begun is None else begun.result()
