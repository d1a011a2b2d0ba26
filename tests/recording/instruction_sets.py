"""Environments in which a server uses a lesser instruction set than the processor has.

The server takes the best instruction set that its compiler knows. Here the compiler is a script that refuses the better
ones. Torch and oneDNN, which compute what has no kernels, have variables of their own.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ISAS = ("avx512", "avx2", "portable", "interpreted")
"""Instruction sets of recordings. `interpreted` is the CUDA path in Triton's interpreter."""
_COMPILER = """\
#!/bin/sh
# A compiler that lacks instruction sets: for recordings of what other processors answer.
case " $* " in {refused}) echo "this compiler lacks the instruction set" >&2; exit 1;; esac
exec {compiler} "$@"
"""


@dataclass(frozen=True, slots=True)
class _Limits:
    """Options that the compiler refuses, and variables of the libraries."""

    refused: tuple[str, ...]
    variables: Mapping[str, str]


_LIMITS = {
    "avx2": _Limits(("-mavx512f",), {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}),
    "portable": _Limits(("-mavx512f", "-mavx2"), {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}),
}


def variables_of(isa: str, cache: Path) -> dict[str, str]:
    """Environment variables of a server that uses this instruction set.

    Args:
        isa: one of ISAS.
        cache: a folder for the compiler, the libraries that it makes, and converted models.

    Raises:
        ValueError: if this processor has not even this instruction set.
    """
    if missing := _missing(isa):
        raise ValueError(f"this processor has no {missing}: choose another instruction set with --isa")
    folder = (cache / isa).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    variables = {"SAMEWISE_CACHE": str(folder), "SAMEWISE_KERNELS": ""}
    if isa == "interpreted":
        return variables | {"TRITON_INTERPRET": "1"}
    if (limits := _LIMITS.get(isa)) is None:
        return variables
    compiler = folder / "c++"
    patterns = "|".join(f'*" {option} "*' for option in limits.refused)
    compiler.write_text(_COMPILER.format(refused=patterns, compiler=os.environ.get("CXX") or "c++"))
    compiler.chmod(0o755)
    return variables | {"CXX": str(compiler), **limits.variables}


def _missing(isa: str) -> str:
    """Features that the instruction set needs and the processor lacks."""
    needed = {"avx512": {"avx512_vnni", "avx512bw", "avx512vl", "avx512dq"}, "avx2": {"avx2", "fma", "f16c"}}.get(isa)
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    features = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    return ", ".join(sorted((needed or set()) - features))
