"""Compiles Triton kernels for an H200 on a machine without a GPU.

After `compile_for_hopper()` the launch functions of the kernels take CPU tensors, compile to machine code, as at the
first launch on an H200, and launch nothing. That needs a process of its own, in which TRITON_INTERPRET is not set when
the kernels are imported: `compiled_in(module)` runs the `main` of a module in one.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.driver import ty_to_cpp

_SHARED_MEMORY = 232448  # bytes that a block can have on an H100 or H200


@dataclass(frozen=True)
class Compiled:
    """One kernel, specialised."""

    name: str
    shared: int
    """Bytes of shared memory."""
    registers: int
    """Registers of a thread."""
    spilled: int
    """Bytes of local memory of a thread."""
    wide: int
    """Instructions that read or write 16 bytes of global memory for a thread."""


class _Utils:
    def __init__(self, compiled: list[Compiled]) -> None:
        self._compiled = compiled

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": _SHARED_MEMORY, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

    def load_binary(self, name: str, cubin: bytes, shared: int, _device: int) -> tuple[int, int, int, int, int]:
        registers, spilled = _resources(cubin)
        wide = len(re.findall(r"(?:LDG|STG)\.E(?:\.\w+)*\.128", _cuobjdump("-sass", cubin)))
        self._compiled.append(Compiled(name, shared, registers, spilled, wide))
        return 0, 0, registers, spilled, 1024


class HopperDriver(DriverBase):
    """Stands in for CUDA's."""

    def __init__(self, compiled: list[Compiled]) -> None:
        super().__init__()
        self.utils = _Utils(compiled)

    def launcher_cls(self, _source: Any, _metadata: Any) -> Any:
        return lambda *_: None

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return str(ty_to_cpp(ty))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


def compile_for_hopper() -> list[Compiled]:
    """From now on kernels are not launched; the list grows by one entry for each specialisation.

    What has not changed since it was last compiled comes from Triton's cache.
    """
    compiled: list[Compiled] = []
    triton.runtime.driver.set_active(HopperDriver(compiled))
    return compiled


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread."""
    line = next(line for line in _cuobjdump("-res-usage", cubin).splitlines() if "REG:" in line)
    fields = dict(field.split(":")[:2] for field in line.split() if ":" in field)
    return int(fields["REG"]), int(fields["STACK"]) + int(fields["LOCAL"])


def _cuobjdump(option: str, cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def compiled_in(module: str) -> list[Compiled]:
    """Kernels that `python -m module`, which calls `report`, has compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    return [Compiled(**fields) for fields in json.loads(run.stdout.splitlines()[-1])]


def report(launch: Callable[[], None]) -> None:
    """Print what `launch` compiles, for `compiled_in`."""
    compiled = compile_for_hopper()
    launch()
    sys.stdout.write(json.dumps([asdict(kernel) for kernel in compiled]))
