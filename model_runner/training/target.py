"""The model that heads are trained for, run as it is served, one sequence at a time."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model_runner.attention.backend import AttentionBackend
from model_runner.attention.cpu import NativeAttention
from model_runner.attention.reference import ReferenceAttention
from model_runner.batch import Batch
from model_runner.config import RunnerConfig
from model_runner.cores import available_cores
from model_runner.kernels.build import NoKernelsError, build_kernels
from model_runner.kernels.library import Kernels
from model_runner.kv_cache import KVCache, cache_structs, resolve_kv_dtype
from model_runner.models.checkpoint_quantization import as_served
from model_runner.models.features import Feature
from model_runner.models.fused import bind_layers
from model_runner.models.hf_attention import StepAttention
from model_runner.models.inspection import inspect_model
from model_runner.models.loading import load_config, load_model, resolve_device, resolve_dtype, resolve_quantization
from model_runner.models.native import NativePacker
from model_runner.models.repository import cache_folder
from model_runner.models.target import HFTargetModel


class TargetForTraining:
    """Computes hidden states of whole sequences, with the products and the KV cache types of the server."""

    def __init__(self, config: RunnerConfig, needs: Collection[Feature], max_tokens: int) -> None:
        """Loads the model; no sequence is longer than `max_tokens`. Raises as ModelRunner.load does."""
        self._device = resolve_device(config.device)
        threads = config.threads or available_cores()
        torch.set_num_threads(threads)
        hf_config = as_served(config.model, load_config(config.model), self._device, exact=True)
        kernels = _kernels(threads) if self._device.type == "cpu" else None
        kind = resolve_quantization(config.quantization, self._device, kernels)
        packer = NativePacker(kernels, kind) if kernels and kind else None
        compute = resolve_dtype(config.dtype, hf_config, self._device)
        kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, compute, self._device, quantized_weights=kind is not None)
        shape = inspect_model(hf_config)
        model = load_model(config.model, hf_config, compute, self._device, packer)
        self._block_size = config.block_size
        cache = KVCache(shape.kv, -(-max_tokens // config.block_size), config.block_size, kv_dtype, self._device)
        if packer is not None:
            bind_layers(model, cache_structs(cache))
        self._attention: AttentionBackend[Any] = (
            ReferenceAttention(cache) if kernels is None else NativeAttention(kernels, cache)
        )
        self._target = HFTargetModel(model, self._device, needs)

    def features(self, tokens: Sequence[int]) -> dict[Feature, Tensor]:
        """Each feature [T, hidden] of a sequence of T tokens, on the device."""
        batch = self._batch(tokens)
        self._target.forward(batch, StepAttention(self._attention, self._attention.prepare(batch)))
        return dict(self._target.features())

    def _batch(self, tokens: Sequence[int]) -> Batch:
        """One choice that computes all of its tokens; logits only of the last, since the model insists on some."""
        count = len(tokens)
        positions = np.arange(count, dtype=np.int64)
        return Batch(
            tokens=np.asarray(tokens, dtype=np.int64),
            positions=positions,
            choice_of=np.zeros(count, dtype=np.int64),
            block_tables=[list(range(-(-count // self._block_size)))],
            block_of=positions // self._block_size,
            offset_of=positions % self._block_size,
            logits_index=positions[-1:],
            samples=[],
            prompt_rows=[],
        )


def _kernels(threads: int) -> Kernels | None:
    """As in the runner: without them, all runs in float32."""
    try:
        return Kernels(build_kernels(cache_folder()), threads)
    except NoKernelsError:
        return None
