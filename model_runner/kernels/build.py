"""Builds the native libraries with the system's C++ compiler, once, into a cache folder.

The library of CPU kernels contains all instruction sets and selects one at run time, so it can be copied to other
machines of the same architecture. A cached library needs no compiler.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("samewise.runner")

_KERNELS = Path(__file__).parent / "cpu"
_SUFFIX = Path(__file__).parent / "suffix"
_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
]
_AVX512_FLAGS = ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
_X86_FLAGS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512vnni": _AVX512_FLAGS,
    "avx512bf16": [*_AVX512_FLAGS, "-mavx512bf16"],
}
_COMPILERS = ("c++", "g++", "clang++")


class NoKernelsError(RuntimeError):
    """A library cannot be built or loaded on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """One compilation of a source file."""

    source: Path
    name: str
    flags: Sequence[str]


def build_kernels(
    folder: Path,
    extra_flags: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    sources: Path = _KERNELS,
) -> Path:
    """Path of the library of CPU kernels in `folder`; builds it if it is missing.

    Args:
        folder: cache of built libraries; created if missing.
        extra_flags: further options for compiler and linker.
        environment: its CXX names the compiler, if set.
        sources: folder of the C++ files.

    Raises:
        NoKernelsError: if there is no compiler, compilation fails, or the folder is not writable.
    """
    return _build("kernels", _kernel_units(sources), sources, folder, extra_flags, environment)


def build_suffix(
    folder: Path,
    extra_flags: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    sources: Path = _SUFFIX,
) -> Path:
    """Path of the library of suffix automata, the same for every processor. Arguments as for `build_kernels`."""
    return _build("suffix", [_Unit(sources / "suffix.cpp", "suffix", ())], sources, folder, extra_flags, environment)


def _build(
    name: str,
    units: Sequence[_Unit],
    sources: Path,
    folder: Path,
    extra_flags: Sequence[str],
    environment: Mapping[str, str],
) -> Path:
    """Path of a library, built by only one of several concurrent callers while the others wait."""
    library = folder / f"{name}-{_digest(units, extra_flags, sources)}.so"
    if library.exists():
        return library
    compiler = _find_compiler(environment)
    logger.info("building the native library %s with %s, once", name, compiler)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if not library.exists():  # otherwise another process has built it meanwhile
                with tempfile.TemporaryDirectory(dir=folder) as temporary:
                    _compile(compiler, units, extra_flags, Path(temporary)).replace(library)
    except OSError as error:
        raise NoKernelsError(f"the native library {name} cannot be built in {folder}: {error}") from error
    return library


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which other processes and threads wait for."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _kernel_units(sources: Path) -> list[_Unit]:
    kinds: dict[str, list[str]] = {"portable": []}
    if platform.machine() in ("x86_64", "AMD64"):
        kinds |= _X86_FLAGS
    kernels = (_Unit(sources / "kernels.cpp", isa, [f"-DSW_ISA={isa}", *flags]) for isa, flags in kinds.items())
    return [_Unit(sources / "samewise.cpp", "samewise", ()), *kernels]


def _digest(units: Sequence[_Unit], extra_flags: Sequence[str], sources: Path) -> str:
    """A digest of sources and options, so that a change of either triggers a new build."""
    digest = hashlib.sha256(repr((platform.machine(), _FLAGS, list(extra_flags))).encode())
    for unit in units:
        digest.update(repr((unit.name, list(unit.flags))).encode())
    for source in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _find_compiler(environment: Mapping[str, str]) -> str:
    named, path = environment.get("CXX"), environment.get("PATH")
    for candidate in (named,) if named else _COMPILERS:
        if found := shutil.which(candidate, path=path):
            return found
    if named:
        raise NoKernelsError(f"the C++ compiler that CXX names was not found: {named}")
    raise NoKernelsError(f"no C++ compiler was found (looked for {', '.join(_COMPILERS)})")


def _compile(compiler: str, units: Sequence[_Unit], extra_flags: Sequence[str], folder: Path) -> Path:
    """Compile the units in parallel and link them into a library in the folder."""
    jobs = []
    for unit in units:
        command = [compiler, *_FLAGS, *unit.flags, *extra_flags, "-c", str(unit.source), "-o", f"{unit.name}.o"]
        jobs.append(subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [job.communicate()[0] for job in jobs]
    for job, output in zip(jobs, outputs, strict=True):
        _require_success(job.returncode, job.args, output)
    objects = [f"{unit.name}.o" for unit in units]
    link = [compiler, "-shared", "-pthread", *extra_flags, *objects, "-o", "library.so"]
    linked = subprocess.run(link, cwd=folder, capture_output=True, text=True, check=False)
    _require_success(linked.returncode, link, linked.stdout + linked.stderr)
    return folder / "library.so"


def _require_success(code: int, command: object, output: str) -> None:
    if code != 0:
        text = " ".join(command) if isinstance(command, list) else str(command)
        raise NoKernelsError(f"the C++ compiler failed with exit code {code}: {text}\n{output[-2000:]}")
