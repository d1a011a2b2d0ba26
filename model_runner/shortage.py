"""What says that memory ran out: that of the device, or that of the host."""

import torch

_HOST_TENSORS = ("you tried to allocate", "std::bad_alloc")
"""Torch has no class of errors for the memory of tensors on the CPU."""


def shortage(error: Exception) -> str:
    """What an error says if it says that memory ran out: never empty.

    Raises:
        Exception: the error itself, if it says anything else.
    """
    says = str(error)
    is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if is_memory or (isinstance(error, RuntimeError) and any(words in says for words in _HOST_TENSORS)):
        return says or "the host has no memory left"
    raise error
