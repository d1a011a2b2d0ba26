"""Native libraries: the one of the package, a cached one, or one built now with the system's C++ compiler.

A library of CPU kernels contains one or several instruction sets and selects one at run time. Built here, it has the
best one of this processor; packages and SAMEWISE_KERNELS=all have all of them, so they can be copied to other machines
of the same architecture. A library that is there needs no compiler.
"""

import contextlib
import hashlib
import logging
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from model_runner.kernels.compiler import FLAGS, Compiler, NoKernelsError, Unit, compile_library
from model_runner.kernels.library_folder import (
    PACKAGED,
    loadable,
    locked,
    opened,
    private_folder,
    store,
    try_loading,
    unsealed,
)

__all__ = ["NoKernelsError", "build_kernels", "build_packaged", "build_suffix", "detect_isas"]

logger = logging.getLogger("samewise.runner")

_KERNELS = Path(__file__).parent / "cpu"
_SUFFIX = Path(__file__).parent / "suffix"
_AVX512_FLAGS = ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
X86_FLAGS = {
    "avx512bf16": (*_AVX512_FLAGS, "-mavx512bf16"),
    "avx512vnni": _AVX512_FLAGS,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}
"""Compiler options by instruction set, the best one first."""
_X86_FEATURES = {
    "avx512bf16": {"avx512_vnni", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"},
    "avx512vnni": {"avx512_vnni", "avx512bw", "avx512vl", "avx512dq"},
    "avx2": {"avx2", "fma", "f16c"},
}
"""Features that an instruction set needs, as /proc/cpuinfo names them; samewise.cpp asks the processor."""
_CPU_INFO = Path("/proc/cpuinfo")
_SUBFOLDER = "native"


@dataclass(frozen=True, slots=True)
class _Recipe:
    """Sources and options of a library."""

    name: str
    sources: Path
    core: tuple[Unit, ...]
    choices: tuple[tuple[Unit, ...], ...] = ()
    """As for `compile_library`."""

    def title(self, flags: Sequence[str], machine: str = platform.machine()) -> str:
        """Start of the library's file name: it depends on sources, options, and what is to be in the library."""
        units = [[(unit.name, unit.flags) for unit in group] for group in (self.core, *self.choices)]
        digest = hashlib.sha256(repr((machine, FLAGS, list(flags), units)).encode())
        for source in sorted([*self.sources.glob("*.cpp"), *self.sources.glob("*.h")]):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
        return f"{self.name}-{digest.hexdigest()[:16]}"


def build_kernels(
    folder: Path,
    extra_flags: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    sources: Path = _KERNELS,
    cpu_info: Path = _CPU_INFO,
) -> Path:
    """Path of a library of CPU kernels that can be loaded; built if there is none.

    Args:
        folder: cache folder; libraries are in its subfolder `native`.
        extra_flags: further options for compiler and linker.
        environment: its CXX names the compiler, if set, and SAMEWISE_KERNELS=all asks for all instruction sets.
        sources: folder of the C++ files.
        cpu_info: the kernel's description of the processor.

    Raises:
        NoKernelsError: if there is no compiler, compilation fails, or neither the cache nor a private folder is usable.
        ValueError: if SAMEWISE_KERNELS has another value.
    """
    wanted = environment.get("SAMEWISE_KERNELS", "")
    if wanted not in ("", "all"):
        raise ValueError(f"SAMEWISE_KERNELS is {wanted!r}; set it to all, for all instruction sets, or leave it out")
    everything = _kernels_recipe(sources, None)
    recipe = everything if wanted else _kernels_recipe(sources, detect_isas(cpu_info))
    return _find_or_build([recipe, everything, _packaged_recipe(sources)], folder, extra_flags, environment)


def build_suffix(
    folder: Path,
    extra_flags: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    sources: Path = _SUFFIX,
) -> Path:
    """Path of the library of suffix automata, the same for every processor. Arguments as for `build_kernels`."""
    return _find_or_build([_suffix_recipe(sources)], folder, extra_flags, environment)


def build_packaged(folder: Path, environment: Mapping[str, str], machine: str) -> list[Path]:
    """Put both libraries, with all instruction sets, into a package's folder `built`; returns their paths.

    Args:
        folder: it is made if it is missing.
        environment: its CXX names the compiler, and its SAMEWISE_CACHE the cache folder that keeps what is compiled.
            If that is not set, nothing is kept.
        machine: the processor to build for, in the words of `platform.machine`.

    Raises:
        NoKernelsError: if there is no compiler, or a unit does not compile.
        OSError: if a folder cannot be used.
    """
    compiler = Compiler.find(environment)
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        cache = Path(environment.get("SAMEWISE_CACHE") or temporary) / _SUBFOLDER
        for recipe in (_packaged_recipe(_KERNELS, machine), _suffix_recipe(_SUFFIX)):
            title = recipe.title((), machine)
            content = _built_for_package(cache, recipe, f"{title}-{compiler.digest()}.so", compiler)
            (Path(temporary) / "library.so").write_bytes(content)
            made.append(folder / f"{title}.so")
            store(Path(temporary) / "library.so", made[-1], mode=0o644)
    return made


def detect_isas(cpu_info: Path = _CPU_INFO) -> list[str] | None:
    """The instruction sets of this machine's processor, the best one first; None if they are not known."""
    try:
        lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    features = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    return [*(isa for isa, needed in _X86_FEATURES.items() if needed <= features), "portable"]


def _kernels_recipe(sources: Path, isas: Sequence[str] | None, machine: str = platform.machine()) -> _Recipe:
    """The library of the first of these instruction sets that compiles, or of all that there are."""
    flags: dict[str, tuple[str, ...]] = X86_FLAGS if machine in ("x86_64", "AMD64") else {}
    units = {
        isa: Unit(isa, (sources / "kernels.cpp", sources / "layers.cpp"), (f"-DSW_ISA={isa}", *own))
        for isa, own in [*flags.items(), ("portable", ())]
    }
    choices = (tuple(units.values()),) if isas is None else tuple((units[isa],) for isa in isas)
    return _Recipe("kernels", sources, (Unit("samewise", (sources / "samewise.cpp",)),), choices)


def _packaged_recipe(sources: Path, machine: str = platform.machine()) -> _Recipe:
    """The library of all instruction sets, none of which may be left out."""
    recipe = _kernels_recipe(sources, None, machine)
    return replace(recipe, core=(*recipe.core, *(unit for group in recipe.choices for unit in group)), choices=())


def _suffix_recipe(sources: Path) -> _Recipe:
    return _Recipe("suffix", sources, (Unit("suffix", (sources / "suffix.cpp",)),))


def _find_or_build(
    recipes: Sequence[_Recipe], folder: Path, flags: Sequence[str], environment: Mapping[str, str]
) -> Path:
    """The first of these libraries that is there and can be loaded; otherwise the first one, built now.

    If the cache folder cannot be used, a private folder takes its place.
    """
    titles = [recipe.title(flags) for recipe in recipes]
    if (packaged := _loadable([PACKAGED / f"{title}.so" for title in titles])) is not None:
        return packaged
    compiler: Compiler | NoKernelsError
    try:
        compiler = Compiler.find(environment)
    except NoKernelsError as error:
        compiler = error
    reasons = []
    for place in (folder / _SUBFOLDER, private_folder()):
        try:
            with opened(place) as descriptor:
                if isinstance(compiler, NoKernelsError):
                    return _find_of_any_compiler(place, titles, compiler)
                return _find_or_build_in(place, descriptor, recipes[0], titles, compiler, flags)
        except OSError as error:
            reasons.append(f"the native library {recipes[0].name} cannot be built in {place}: {error}")
            logger.warning("%s", reasons[-1])
    raise NoKernelsError("; ".join(reasons))


def _find_of_any_compiler(place: Path, titles: Sequence[str], reason: NoKernelsError) -> Path:
    """A library from a machine that had a compiler. Raises `reason` if there is none."""
    built = [path for title in titles for path in sorted(place.glob(f"{title}-*.so"))]
    if (found := _loadable(built)) is None:
        raise reason
    return found


def _find_or_build_in(
    place: Path, descriptor: int, recipe: _Recipe, titles: Sequence[str], compiler: Compiler, flags: Sequence[str]
) -> Path:
    """A library in an open folder, built by only one of several concurrent callers while the others wait."""
    paths = [place / f"{title}-{compiler.digest()}.so" for title in titles]
    if (found := _loadable(paths, warns=False)) is not None:
        return found
    with locked(descriptor):
        if (found := _loadable(paths)) is not None:  # another process has built it meanwhile
            return found
        logger.info("building the native library %s with %s, once", recipe.name, compiler.command[0])
        with tempfile.TemporaryDirectory(dir=place) as temporary:
            store(compile_library(compiler, recipe.core, recipe.choices, flags, Path(temporary)), paths[0])
    try:
        try_loading(paths[0])
    except OSError as error:
        raise NoKernelsError(f"the native library {recipe.name} was built, but cannot be loaded: {error}") from error
    return paths[0]


def _built_for_package(cache: Path, recipe: _Recipe, name: str, compiler: Compiler) -> bytes:
    """A library's content, compiled unless the cache has it. It is not tried, as it may be for another processor."""
    library = cache / name
    with opened(cache) as descriptor, locked(descriptor):
        with contextlib.suppress(OSError), loadable(library):
            return unsealed(library)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            store(compile_library(compiler, recipe.core, recipe.choices, (), Path(temporary)), library)
        return unsealed(library)


def _loadable(paths: Sequence[Path], *, warns: bool = True) -> Path | None:
    """The first library that exists and can be loaded."""
    for path in paths:
        if not path.exists():
            continue
        try:
            try_loading(path)
        except OSError as error:
            if warns:
                logger.warning("The native library %s is not used, and built again if possible: %s", path, error)
            continue
        return path
    return None
