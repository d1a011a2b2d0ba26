"""Environment variables of the engine process."""

# Short: the benches use it without the engine's packages.

import os

_ALLOCATOR, _OLD_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"

ENVIRONMENT = {
    # Otherwise torch's threads busy-wait for milliseconds after each operator, and take cores from the kernels' own
    # threads and from the HTTP process.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Sampling works on tensors of some megabytes. By default malloc returns each to the kernel, and clearing the next
    # one's pages takes longer than the work itself.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    # Each step allocates tensors of new sizes. Expandable segments of CUDA memory let freed memory be reused instead of
    # fragmenting. Torch builds for the CPU ignore this setting.
    _ALLOCATOR: "expandable_segments:True",
    # Torch's compiler starts Python processes, which must not import from the working folder either.
    "PYTHONSAFEPATH": "1",
}
"""Defaults of the engine process, set before Python starts. The server's own environment takes precedence."""


def engine_environment() -> dict[str, str]:
    """The environment of an engine process: ENVIRONMENT, overridden by the server's own variables.

    Torch reads its allocator's settings from two variables. If the user sets either of them, nothing is added.
    """
    environment = ENVIRONMENT | os.environ
    if _OLD_ALLOCATOR in os.environ and _ALLOCATOR not in os.environ:
        del environment[_ALLOCATOR]
    return environment
