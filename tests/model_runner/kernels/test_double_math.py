"""Logarithm and exponential: right to the last bit but one, and with the same bits on every instruction set."""

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from model_runner.kernels import build
from model_runner.kernels.build import detect_isas
from model_runner.kernels.compiler import FLAGS, Compiler
from model_runner.sampling.noise import logs
from tests.model_runner.oracles.draw import log

Numbers = NDArray[np.float64]
_ALL = """
#include "double_math.h"
extern "C" void logs(const double *x, double *y, long count) {
  for (long i = 0; i < count; ++i) y[i] = SW_ISA::log(x[i]);
}
extern "C" void exps(const double *x, double *y, long count) {
  for (long i = 0; i < count; ++i) y[i] = SW_ISA::exp_not_positive(x[i]);
}
"""
COUNT = 1_000_000
MOST = np.finfo(np.float64).max
LEAST = np.finfo(np.float64).tiny
SUBNORMAL = np.finfo(np.float64).smallest_subnormal


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[ctypes.CDLL]:
    """One for each instruction set of this machine, portable last."""
    folder = tmp_path_factory.mktemp("double_math")
    (folder / "all.cpp").write_text(_ALL)
    libraries = []
    for isa in detect_isas() or ["portable"]:
        options = [*FLAGS, *build.X86_FLAGS.get(isa, ()), f"-DSW_ISA={isa}", f"-I{Path(build.__file__).parent / 'cpu'}"]
        library = folder / f"{isa}.so"
        command = [
            *Compiler.find(os.environ).command,
            *options,
            "-fvisibility=default",
            "-shared",
            "all.cpp",
            "-o",
            library,
        ]
        subprocess.run(command, cwd=folder, check=True)
        libraries.append(ctypes.CDLL(str(library)))
    return libraries


def computed(library: ctypes.CDLL, name: str, x: Numbers) -> Numbers:
    y = np.empty_like(x)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (x, y)]
    getattr(library, name)(*pointers, ctypes.c_long(len(x)))
    return y


def of_logarithms() -> Numbers:
    """Positive numbers: uniform ones as noise has them, near 1, of all magnitudes, and the edges."""
    rng = np.random.default_rng(0)
    noise = (rng.integers(0, 1 << 52, COUNT) + 0.5) * 2.0**-52
    near = np.exp2(rng.normal(size=COUNT) * rng.choice([1e-9, 1e-3, 0.5], COUNT))
    anywhere = np.exp2(rng.uniform(-1074, 1024, COUNT))
    edges = [1.0, np.sqrt(0.5), np.sqrt(2), 2.0**-53, 1 - 2.0**-53, 1 + 2.0**-52, LEAST, SUBNORMAL, 7 * SUBNORMAL]
    beside = np.concatenate([np.nextafter(edges, 0), edges, np.nextafter(edges, np.inf), [MOST]])
    all_of_them = np.concatenate([noise, -logs(noise), near, anywhere, beside])
    return all_of_them[all_of_them > 0]


def of_exponentials() -> Numbers:
    rng = np.random.default_rng(1)
    small, large = rng.normal(size=COUNT) * rng.choice([1e-9, 1e-3, 1], COUNT), rng.uniform(-708, 0, COUNT)
    return np.concatenate([-np.abs(small), large, [0.0, -0.0, -SUBNORMAL, -1.0, -708.0, np.log(0.5)]])


def errors(exact: Callable[[NDArray[np.longdouble]], NDArray[np.longdouble]], x: Numbers, y: Numbers) -> Numbers:
    """In units of the last place."""
    truth = exact(x.astype(np.longdouble))
    return np.abs((y - truth) / np.spacing(np.abs(truth).astype(np.float64))).astype(np.float64)


def test_logarithms_have_the_same_bits_everywhere(libraries: list[ctypes.CDLL]) -> None:
    """In C++ with and without fused products, in numpy, and in Python."""
    x = of_logarithms()
    expected = logs(x)
    for library in libraries:
        np.testing.assert_array_equal(computed(library, "logs", x), expected)
    some = np.concatenate([x[:: len(x) // 20_000], x[-40:]])
    assert [log(number) for number in some.tolist()] == logs(some).tolist()


def test_logarithms_are_right() -> None:
    x = of_logarithms()
    assert errors(np.log, x, logs(x)).max() < 1
    assert log(1.0) == 0
    assert logs(np.exp2(np.arange(-1074.0, 1024.0))).tolist() == pytest.approx(
        np.arange(-1074, 1024) * np.log(2), rel=1e-15
    )


def test_the_logarithm_of_what_has_none(libraries: list[ctypes.CDLL]) -> None:
    x = np.array([0.0, -0.0, np.inf, -1.0, -SUBNORMAL, -np.inf, np.nan])
    for library in libraries:
        np.testing.assert_array_equal(computed(library, "logs", x), [-np.inf, -np.inf, np.inf, *[np.nan] * 4])


def test_exponentials_have_the_same_bits_everywhere_and_are_right(libraries: list[ctypes.CDLL]) -> None:
    x = of_exponentials()
    expected = computed(libraries[-1], "exps", x)
    for library in libraries:
        np.testing.assert_array_equal(computed(library, "exps", x), expected)
    assert errors(np.exp, x, expected).max() < 1
    edges = np.array([0.0, -SUBNORMAL, -708.0001, -MOST, -np.inf, np.nan])
    np.testing.assert_array_equal(computed(libraries[0], "exps", edges), [1, 1, 0, 0, 0, np.nan])


def test_fused_products_would_be_noticed(libraries: list[ctypes.CDLL]) -> None:
    """The same source with fused products has other bits, so that the comparison above is one."""
    if "avx2" not in (detect_isas() or ()):
        pytest.skip("this machine has no fused products")
    source = Path(libraries[0]._name).parent
    fused = [
        *Compiler.find(os.environ).command,
        "-std=c++20",
        "-O2",
        "-mfma",
        "-ffp-contract=fast",
        "-DSW_ISA=fused",
        "-fPIC",
    ]
    command = [*fused, f"-I{Path(build.__file__).parent / 'cpu'}", "-shared", "all.cpp", "-o", "fused.so"]
    subprocess.run(command, cwd=source, check=True)
    x = of_logarithms()
    assert (computed(ctypes.CDLL(str(source / "fused.so")), "logs", x) != logs(x)).any()
