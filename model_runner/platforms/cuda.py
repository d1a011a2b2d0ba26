"""CUDA: Triton kernels, and graphs of small steps."""

import logging
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from model_runner.attention.backend import AttentionBackend
from model_runner.attention.triton import TritonAttention
from model_runner.config import LogprobsMode, RunnerConfig, Sizes
from model_runner.cuda_graphs import GraphedTarget, GraphMaker, graph_sizes
from model_runner.kv_cache import KVCache, resolve_kv_dtype
from model_runner.memory import GIB, Measured, Room, StorageTypes
from model_runner.models.cuda_layer import compile_layers, fuse_layers, replace_norms
from model_runner.models.cuda_linear import GpuWeightKind, make_product, stored_bytes
from model_runner.models.features import Feature
from model_runner.models.grouped_experts import GROUPED_EXPERTS_NAME, group_experts, register_grouped_experts
from model_runner.models.inspection import ModelShape, UnsupportedModelError
from model_runner.models.loading import load_config, load_model
from model_runner.models.packed import pack_weights
from model_runner.models.target import HFTargetModel, TargetModel
from model_runner.platforms.platform import Platform
from model_runner.sampling.sampler import Sampler
from model_runner.sampling.triton_draw import TritonDraw

logger = logging.getLogger("samewise.runner")

_CACHE_SHARE = 0.92
"""Of what is left after weights and a largest step; graphs and what memory loses in pieces take the rest."""
_LARGE = 40 * GIB
"""From so much memory on, steps are large."""


class CudaPlatform(Platform):
    """Everything in the checkpoint's own type, unless weights, keys and values are to take less."""

    kernels = "triton"

    def __init__(self, config: RunnerConfig, device: torch.device, graphs: GraphMaker | None) -> None:
        """Raises ValueError for settings that CUDA cannot follow.

        Args:
            config: what is asked for.
            device: where everything goes.
            graphs: captures small steps; None runs them as they are.
        """
        self.device = device
        if config.threads is not None:
            raise ValueError("threads is for the CPU's kernels; leave it out on CUDA")
        compute = _compute_type(config)
        self._weights = _weight_kind(config)
        kv = resolve_kv_dtype(config.kv_cache_dtype, compute, torch.device("cuda"), quantized_weights=False)
        self.types = StorageTypes(compute, self._weights, kv)
        self._exact = config.exact
        self._graphs = graphs

    def sizes(self, config: RunnerConfig) -> Sizes:
        """See Platform.sizes."""
        is_large = torch.cuda.mem_get_info(self.device)[1] >= _LARGE
        seqs, tokens = (256, 8192) if is_large else (128, 2048)
        return Sizes(config.max_num_seqs or seqs, config.max_num_batched_tokens or tokens)

    def room(self) -> Room:
        """See Platform.room."""
        return Room(str(self.device), torch.cuda.mem_get_info(self.device)[0], _CACHE_SHARE)
