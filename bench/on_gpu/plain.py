"""The same steps by plain transformers: the model's own forward, SDPA attention, dynamic cache, no CUDA graphs."""

import time
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from bench.on_gpu.timing import synchronize


class PlainSteps:
    """Counterpart of steps.RunnerSteps. Times are measured on the host until the device has finished."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        options: Any = {"dtype": dtype, "attn_implementation": "sdpa", "device_map": device}
        model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
        self._model = model.eval()
        self._device = device
        self._vocab_size = self._model.config.vocab_size
        parameters = signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # its name before transformers 5.24
        self._cache = DynamicCache()
        self._next = torch.zeros(0, 1, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def admit(self, rows: int, context: int, *, prefilled: int) -> None:
        """Fill a cache with `rows` sequences: at most `prefilled` are computed, the others are copies of these.

        `prefilled` must divide `rows` if it is smaller.
        """
        computed = min(rows, prefilled)
        self._cache = DynamicCache()
        self._model(
            self._tokens(computed, context), **{self._cache_name: self._cache}, use_cache=True, logits_to_keep=1
        )
        self._cache.batch_repeat_interleave(rows // computed)
        self._next = self._tokens(rows, 1)

    @torch.inference_mode()
    def decode(self) -> float:
        """Milliseconds of a step that decodes one token for each sequence."""
        synchronize(self._device)
        start = time.perf_counter()
        output = self._model(self._next, **{self._cache_name: self._cache}, use_cache=True)
        self._next = output.logits[:, -1:].argmax(-1)
        synchronize(self._device)
        return 1e3 * (time.perf_counter() - start)

    @torch.inference_mode()
    def prefill(self, tokens: int) -> float:
        """Milliseconds to compute a prompt and its first token."""
        prompt = self._tokens(1, tokens)
        synchronize(self._device)
        start = time.perf_counter()
        output = self._model(prompt, **{self._cache_name: DynamicCache()}, use_cache=True, logits_to_keep=1)
        output.logits[:, -1:].argmax(-1)
        synchronize(self._device)
        return 1e3 * (time.perf_counter() - start)

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int]) -> NDArray[np.float64]:
        """Log-probability of each token of a prompt except the first."""
        tokens = torch.tensor([prompt], device=self._device)
        logits: Tensor = self._model(tokens, use_cache=False).logits[0, :-1]  # [tokens - 1, vocab]
        chosen = logits.float().log_softmax(-1).gather(1, tokens[0, 1:, None])
        result: NDArray[np.float64] = chosen.squeeze(1).double().cpu().numpy()
        return result

    def release(self) -> None:
        """Free the cache."""
        self._cache = DynamicCache()

    def _tokens(self, rows: int, count: int) -> torch.Tensor:
        return torch.randint(0, self._vocab_size, (rows, count), device=self._device)
