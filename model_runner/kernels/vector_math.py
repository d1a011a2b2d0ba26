"""Makes torch's vector functions ready before threads use them."""

# Short: platforms and the learner call it, and have nothing else in common.

import torch


def prepare_vector_math() -> None:
    """Call one of torch's vector functions in a single thread, before any is called in several.

    MKL, which computes `exp`, `log`, `tanh`, `erf`, `sin` and `cos` for torch on CPU, chooses its code at the first
    call. If two threads make that call at once, one of them sometimes computes its share with errors of up to 4e-4.
    Tables of rotary positions would then be wrong until the process ends.
    """
    torch.zeros(1).exp()
