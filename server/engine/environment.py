"""What the engine process finds in its environment."""

# Short: the benches read it without the packages that the engine needs.

import os

_ALLOCATOR, _OLD_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"

ENVIRONMENT = {
    # After each of torch's operators its threads would wait for the next one in a busy loop, for milliseconds, and take
    # the cores from the kernels' own threads and from the HTTP process.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Sampling works on tensors of some megabytes. By default malloc returns each to the kernel, and clearing the pages
    # of the next takes longer than the work itself.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    # Steps take tensors of ever new sizes. Where segments of CUDA memory can grow, what is freed fits the next ones and
    # does not end as pieces too small for any. Builds of torch for the CPU read it and do nothing.
    _ALLOCATOR: "expandable_segments:True",
    # Torch's compiler starts processes of Python, which are to import nothing from the working folder either.
    "PYTHONSAFEPATH": "1",
}
"""Of the engine process, where the server's own environment does not say otherwise; read before Python starts."""


def engine_environment() -> dict[str, str]:
    """All that an engine process finds in its environment: the server's own, and ENVIRONMENT.

    Torch reads its allocator's settings under two names, parts of them under one and parts under the other, so nothing
    is added to what the user says under either.
    """
    environment = ENVIRONMENT | os.environ
    if _OLD_ALLOCATOR in os.environ and _ALLOCATOR not in os.environ:
        del environment[_ALLOCATOR]
    return environment
