"""Kernels that fail: nothing is thrown through the C interface, and no process ends."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from model_runner.kernels import build
from model_runner.kernels.build import build_kernels
from model_runner.kernels.interface import CPU
from model_runner.kernels.library import Kernels
from model_runner.kernels.library_folder import loadable

_CPU = Path(build.__file__).parent / "cpu"
_THROWING = """
#include <new>
#include <system_error>
#include "runtime.h"

namespace kernels {
[[noreturn]] void fail() {
  static int calls = 0;
  if (calls++ % 2) throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
  throw std::bad_alloc();
}
#define SW_FUNCTION(result, name, arguments) result name arguments { fail(); }
#include "functions.h"

int64_t packed_size(int32_t, int32_t, int32_t) { return 64; }
int32_t pack(SwContext *, int32_t, const float *, int32_t, int32_t, int8_t *, float *) { return 0; }
int32_t linear(SwContext *context, const SwWeight *, const float *, int32_t rows, float *y) {
  context->pool.for_each(rows, [&](int64_t row) {
    if (row % 5 == 3) throw std::bad_alloc();
    y[row] += 1;
  });
  return 0;
}
}  // namespace kernels

namespace samewise {
SwKernels made() {
  SwKernels made = {
      "portable",
#define SW_FUNCTION(result, name, arguments) Guarded<kernels::name>::call,
#include "functions.h"
  };
  if (!POOL_WORKS) return made;
  made.sw_packed_size = kernels::packed_size;
  made.sw_pack = kernels::pack;
  made.sw_linear = Guarded<kernels::linear>::call;
  return made;
}
extern const SwKernels portable_kernels = made();
}  // namespace samewise
"""


def build_throwing(folder: Path, *, pool_works: bool) -> Path:
    """The library's real interface and threads, on kernels that throw; or on a product whose work throws."""
    for name in ("samewise.cpp", "samewise.h", "functions.h", "runtime.h"):
        (folder / name).write_bytes((_CPU / name).read_bytes())
    (folder / "kernels.cpp").write_text(_THROWING.replace("POOL_WORKS", str(pool_works).lower()))
    (folder / "layers.cpp").touch()
    (folder / "cpuinfo").write_text("flags: none\n")
    return build_kernels(folder, sources=folder, cpu_info=folder / "cpuinfo")


@pytest.fixture(scope="module")
def throwing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_throwing(tmp_path_factory.mktemp("throwing"), pool_works=True)


def test_what_kernels_throw_becomes_an_error(tmp_path: Path) -> None:
    """In every function of the interface that has a context and reports errors."""
    library = CPU.load(build_throwing(tmp_path, pool_works=False))
    context = library.sw_create(1, b"auto")
    kernels = library.sw_kernels(context)
    names = re.findall(r"\b(sw_\w+), \(SwContext \*context, ", (_CPU / "functions.h").read_text())
    assert {"sw_pack", "sw_repack", "sw_unpack", "sw_linear", "sw_forward", "sw_pick", "sw_move_kv"} <= set(names)
    for name in names:
        function = getattr(kernels, name)
        arguments = [argument_for(kind) for kind in CPU.ffi.typeof(function).args[1:]]
        assert [function(context, *arguments) for _ in range(2)] == [1, 1], name
    library.sw_destroy(context)


def argument_for(kind: Any) -> Any:
    """One where that is a number, a step of one token, and null."""
    if kind.kind == "primitive":
        return 1
    return CPU.new("SwStep", num_tokens=1) if kind.item is CPU.ffi.typeof("SwStep") else CPU.ffi.NULL


@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_thread_of_the_pool_throws_becomes_an_error(throwing: Path, threads: int) -> None:
    """And the pool is as it was."""
    kernels = Kernels(throwing, threads)
    weight = kernels.pack("int8", torch.zeros(1, 64))
    for _ in range(200):
        with pytest.raises(MemoryError, match="out of memory in sw_linear"):
            kernels.linear(weight, torch.zeros(50, 64))
        kernels.linear(weight, torch.zeros(3, 64))


_NO_THREADS = """
#include <cerrno>
#include <dlfcn.h>
#include <pthread.h>

static int left = 2;

extern "C" int pthread_create(pthread_t *thread, const pthread_attr_t *options, void *(*run)(void *), void *with) {
  if (left-- <= 0) return EAGAIN;
  using Create = int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
  return reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"))(thread, options, run, with);
}
"""
_FEW = """
import ctypes, sys
from pathlib import Path
library = ctypes.CDLL(sys.argv[1])
library.sw_create.restype = ctypes.c_void_p
library.sw_threads.argtypes = library.sw_destroy.argtypes = [ctypes.c_void_p]
context = library.sw_create(8, b"portable")
print(library.sw_threads(context))
library.sw_destroy(context)
"""


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer has a pthread_create of its own")
def test_where_the_system_refuses_threads_there_are_fewer(throwing: Path, tmp_path: Path) -> None:
    """As with RLIMIT_NPROC or a control group's pids.max: pthread_create fails with EAGAIN after two threads."""
    (tmp_path / "threads.cpp").write_text(_NO_THREADS)
    command = ["c++", "-shared", "-fPIC", str(tmp_path / "threads.cpp"), "-o", str(tmp_path / "threads.so")]
    subprocess.run(command, check=True)
    with loadable(throwing):
        environment = os.environ | {"LD_PRELOAD": str(tmp_path / "threads.so")}
        few = subprocess.run(
            [sys.executable, "-c", _FEW, str(throwing)], env=environment, capture_output=True, text=True, check=True
        )
    assert few.stdout == "3\n"
