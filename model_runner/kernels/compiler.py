"""Finds the system's C++ compiler, and compiles and links native libraries with it."""

import hashlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("samewise.runner")

FLAGS = (
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
_GCC_FLAGS = ("-ftree-vectorize", "-fvect-cost-model=dynamic", "-fpeel-loops", "-funswitch-loops")
"""Passes of -O3 that make decoding faster; all of them take a third longer to compile. Clang vectorises with -O2, and
does not know all of these options."""
_COMPILERS = ("c++", "g++", "clang++")


class NoKernelsError(RuntimeError):
    """A library cannot be built or loaded on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Source files that are compiled alike, and of no use without each other."""

    name: str
    sources: tuple[Path, ...]
    flags: tuple[str, ...] = ()

    @property
    def objects(self) -> list[str]:
        """Names of the object files, in the order of the sources."""
        return [f"{self.name}-{source.stem}.o" for source in self.sources]


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler that can be started."""

    command: Sequence[str]
    """With the options that CXX names, and those that only this kind of compiler knows."""
    description: str
    """The command and what it says about its version."""

    @classmethod
    def find(cls, environment: Mapping[str, str]) -> "Compiler":
        """The compiler that CXX names, or the first of the usual names. Raises NoKernelsError if there is none."""
        command = _find_command(environment)
        try:
            done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
        except OSError as error:
            raise NoKernelsError(f"the C++ compiler {command[0]} cannot be started: {error}") from error
        if "clang" not in done.stdout:
            command += _GCC_FLAGS
        return cls(command, f"{shlex.join(command)}\n{done.stdout}{done.stderr}")

    def digest(self) -> str:
        """Eight digits of a hash of its description."""
        return hashlib.sha256(self.description.encode()).hexdigest()[:8]


def _find_command(environment: Mapping[str, str]) -> list[str]:
    named, path = shlex.split(environment.get("CXX", "")), environment.get("PATH")
    for command in (named,) if named else ([name] for name in _COMPILERS):
        if found := shutil.which(command[0], path=path):
            return [found, *command[1:]]
    if named:
        raise NoKernelsError(f"the C++ compiler that CXX names was not found: {named[0]}")
    raise NoKernelsError(f"no C++ compiler was found (looked for {', '.join(_COMPILERS)})")


def compile_library(
    compiler: Compiler, core: Sequence[Unit], choices: Sequence[Sequence[Unit]], flags: Sequence[str], folder: Path
) -> Path:
    """Compile units and link them into a library in the folder; returns its path.

    A unit among the choices that does not compile is left out, with a warning.

    Args:
        compiler: compiles and links.
        core: units that the library cannot do without. They are compiled with the first choice, in parallel.
        choices: groups of units, best first. Each but the first is compiled only if nothing of those before it does.
        flags: further options for compiler and linker.
        folder: an empty folder for object files.

    Raises:
        NoKernelsError: if a unit of the core, or every choice, does not compile, or linking fails.
        OSError: if the compiler cannot be started.
    """
    linked: list[Unit] = []
    failed: list[NoKernelsError] = []
    for index, group in enumerate(choices or [()]):
        needed = () if index else core
        results = _compile(compiler.command, [*needed, *group], flags, folder)
        for unit, error in results.items():
            if error is None:
                linked.append(unit)
            elif unit in needed:
                raise error
            else:
                failed.append(error)
                logger.warning("The kernels for %s do not compile and are left out: %s", unit.name, error)
        if len(linked) > len(core):
            break
    if failed and len(linked) == len(core):
        raise failed[0]
    objects = [name for unit in linked for name in unit.objects]
    link = [*compiler.command, "-shared", "-pthread", *flags, *objects, "-o", "library.so"]
    done = subprocess.run(link, cwd=folder, capture_output=True, text=True, check=False)
    if (error := _failure(done.returncode, link, done.stdout + done.stderr)) is not None:
        raise error
    return folder / "library.so"


def _compile(
    command: Sequence[str], units: Sequence[Unit], flags: Sequence[str], folder: Path
) -> dict[Unit, NoKernelsError | None]:
    """Compile units in parallel, each into its object files; returns each one's first error, or None."""
    jobs = []
    results: dict[Unit, NoKernelsError | None] = dict.fromkeys(units)
    with ExitStack() as started, _group() as group:
        for unit in units:
            for source, target in zip(unit.sources, unit.objects, strict=True):
                job = [*command, *FLAGS, *unit.flags, *flags, "-c", str(source), "-o", target]
                process = subprocess.Popen(
                    job,
                    cwd=folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    process_group=group,
                )
                jobs.append((unit, started.enter_context(process)))
        for unit, process in jobs:
            output = process.communicate()[0]
            results[unit] = results[unit] or _failure(process.returncode, process.args, output)
    return results


@contextmanager
def _group() -> Iterator[int]:
    """The id of a process group whose processes are killed at the end, also if this process is killed before.

    Its leader waits for the end of a pipe that this process has open. A signal of the parent's death would reach the
    compiler's command alone, and not the processes that this starts.
    """
    command = ["/bin/sh", "-c", "read -r _; kill -s KILL 0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0) as leader:
        try:
            yield leader.pid
        finally:
            os.killpg(leader.pid, signal.SIGKILL)


def _failure(code: int, command: object, output: str) -> NoKernelsError | None:
    if code == 0:
        return None
    text = shlex.join(command) if isinstance(command, list) else str(command)
    return NoKernelsError(f"the C++ compiler failed with exit code {code}: {text}\n{output[-2000:]}")
