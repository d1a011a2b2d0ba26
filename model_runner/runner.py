"""The model runner: executes the scheduler's plans on one device."""

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from model_runner.attention.backend import AttentionBackend
from model_runner.attention.cpu import NativeAttention, cache_structs
from model_runner.attention.reference import ReferenceAttention
from model_runner.batch import Batch
from model_runner.config import RunnerConfig
from model_runner.contract import (
    AdmittedRequest,
    ChoiceResult,
    SamplingParams,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from model_runner.cores import available_cores
from model_runner.kernels.build import NoKernelsError, build_kernels
from model_runner.kernels.library import Kernels
from model_runner.kv_cache import KVCache, resolve_kv_dtype
from model_runner.memory import StorageTypes, plan_memory
from model_runner.models.fused import bind_layers
from model_runner.models.hf_attention import StepAttention
from model_runner.models.inspection import UnsupportedModelError, inspect_model
from model_runner.models.loading import (
    load_config,
    load_model,
    resolve_device,
    resolve_dtype,
    resolve_quantization,
)
from model_runner.models.native import NativePacker
from model_runner.models.repository import cache_folder
from model_runner.models.target import HFTargetModel, TargetModel
from model_runner.sampling.logprobs import prompt_logprobs
from model_runner.sampling.rows import SamplingState
from model_runner.sampling.sampler import Picks, Sampler
from model_runner.state import RunnerState

logger = logging.getLogger("samewise.runner")


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a loaded runner can do."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    device: str
    dtype: str
    """Of the weights in products."""
    kv_dtype: str
    kernels: str
    """The instruction set of the native kernels, "none" without them."""
    weights_s: float = 0.0
    """Seconds that reading and packing the weights took."""
    first_step_s: float = 0.0
    """Seconds that the warm-up took."""


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """What a runner is made of; tests put fakes in place of some."""

    target: TargetModel
    attention: AttentionBackend[Any]
    kv_cache: KVCache
    state: RunnerState
    sampling: SamplingState
    sampler: Sampler


class ModelRunner:
    """Implements contract.Runner: one forward pass over a plan's tokens, then a token for each choice that is ready."""

    def __init__(self, parts: RunnerParts, info: RunnerInfo) -> None:
        self.info = info
        self._target = parts.target
        self._attention = parts.attention
        self._kv_cache = parts.kv_cache
        self._state = parts.state
        self._sampling = parts.sampling
        self._sampler = parts.sampler

    @classmethod
    def load(cls, config: RunnerConfig) -> "ModelRunner":
        """Plan the memory, load the model and run a first step.

        Raises:
            DoesNotFitError: if weights and cache do not fit in memory.
            UnsupportedModelError: if the architecture cannot be served.
            ValueError: if device or dtype cannot be had.
        """
        device = resolve_device(config.device)
        threads = config.threads or available_cores()
        torch.set_num_threads(threads)
        kernels = _load_kernels(threads) if device.type == "cpu" else None
        hf_config = load_config(config.model)
        types = _resolve_types(config, resolve_dtype(config.dtype, hf_config, device), device, kernels)
        shape = inspect_model(hf_config)
        plan = plan_memory(shape, config, types, device)
        for line in plan.lines():
            logger.info(line)

        start = time.perf_counter()
        packer = NativePacker(kernels, types.weights) if kernels and types.weights else None
        model = load_model(config.model, hf_config, types.compute, device, packer)
        weights_s = time.perf_counter() - start
        target = HFTargetModel(model, device)
        kv_cache = KVCache(shape.kv, plan.num_blocks, config.block_size, types.kv, device)
        if packer is not None:
            bind_layers(model, cache_structs(kv_cache))
        sampling = SamplingState(config.max_num_seqs, shape.vocab_size, device)
        runner = cls(
            RunnerParts(
                target=target,
                attention=ReferenceAttention(kv_cache) if kernels is None else NativeAttention(kernels, kv_cache),
                kv_cache=kv_cache,
                state=RunnerState(config.max_num_seqs, config.block_size, sampling, device),
                sampling=sampling,
                sampler=Sampler(shape.vocab_size, device, config.logprobs_mode, kernels),
            ),
            RunnerInfo(
                vocab_size=shape.vocab_size,
                max_model_len=plan.max_model_len,
                num_blocks=plan.num_blocks,
                block_size=config.block_size,
                device=plan.device,
                dtype=plan.dtype,
                kv_dtype=plan.kv_dtype,
                kernels="none" if kernels is None else kernels.isa,
                weights_s=weights_s,
            ),
        )
        start = time.perf_counter()
        runner.warm_up()
        target.settle()
        runner.info = replace(runner.info, first_step_s=time.perf_counter() - start)
        return runner

    @property
    def num_blocks(self) -> int:
        """How many KV blocks there are."""
        return self.info.num_blocks

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one forward pass over all scheduled tokens and commit what it samples."""
        if self._attention.needs_clean_blocks:
            self._kv_cache.clear(_new_blocks(plan, self.info.block_size))
        self._kv_cache.copy_blocks(plan.copies)
        choices = self._state.apply(plan)
        batch = self._state.gather(choices, plan.scheduled)
        logits = self._target.forward(batch, StepAttention(self._attention, self._attention.prepare(batch)))
        rows = self._sampling.rows([choices[index].slot for index in batch.sampled])
        # Without prompt logprobs all rows are drawn from, in their order: no need to copy them.
        drawn = logits.index_select(0, batch.sample_rows) if batch.prompt_rows else logits
        picks = self._sampler(drawn, rows)
        results = _results(plan, batch, picks, self._prompt_logprobs(logits, batch, [c.sampling for c in choices]))
        for choice, entry, result in zip(choices, plan.scheduled, results, strict=True):
            self._state.commit(choice, entry.num_tokens, result.tokens)
        return StepResult(tuple(results))

    def _prompt_logprobs(
        self, logits: Tensor, batch: Batch, sampling: list[SamplingParams]
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """For each choice that asked, by its index in the batch."""
        return {
            part.choice: tuple(
                prompt_logprobs(logits[part.rows], part.targets, sampling[part.choice].prompt_logprobs or 0)
            )
            for part in batch.prompt_rows
        }

    def warm_up(self) -> None:
        """Run one token through everything, so that the first request does not pay for it.

        Raises:
            UnsupportedModelError: if the model uses its weights in a way that cannot be served.
        """
        admitted = AdmittedRequest("warm-up", (0,), 1, 0, (0,), SamplingParams(temperature=0.0))
        try:
            self.execute(StepPlan((), (), (admitted,), (ScheduledRequest("warm-up", 1, ()),)))
        except NotImplementedError as error:
            raise UnsupportedModelError(str(error)) from error
        self._state.apply(StepPlan(("warm-up",), (), (), ()))


def _load_kernels(threads: int) -> Kernels | None:
    """The native kernels; None, with a warning, where they cannot be built."""
    try:
        return Kernels(build_kernels(cache_folder()), threads)
    except NoKernelsError as error:
        logger.warning("no native kernels, so the server runs several times slower, in float32: %s", error)
        return None


def _resolve_types(
    config: RunnerConfig, compute: torch.dtype, device: torch.device, kernels: Kernels | None
) -> StorageTypes:
    weights = resolve_quantization(config.quantization, device, kernels)
    kv = resolve_kv_dtype(config.kv_cache_dtype, compute, device, quantized_weights=weights is not None)
    return StorageTypes(compute, weights, kv)


def _new_blocks(plan: StepPlan, block_size: int) -> list[int]:
    """Blocks whose content is nobody's: all that the plan hands out but shared ones and the targets of copies."""
    fresh = [block for entry in plan.scheduled for block in entry.new_blocks]
    for admitted in plan.admitted:
        fresh += admitted.blocks[-(-admitted.num_computed // block_size) :]
    return fresh


def _results(
    plan: StepPlan, batch: Batch, picks: Picks, prompts: dict[int, tuple[TokenLogprobs, ...]]
) -> list[ChoiceResult]:
    """One result for each scheduled choice."""
    row_of = {index: row for row, index in enumerate(batch.sampled)}
    results = []
    for index, entry in enumerate(plan.scheduled):
        row = row_of.get(index)
        error = picks.errors[row] if row is not None else None
        logprobs = picks.logprobs[row] if row is not None else None
        results.append(
            ChoiceResult(
                key=entry.key,
                tokens=(picks.tokens[row],) if row is not None and error is None else (),
                logprobs=(logprobs,) if logprobs is not None and error is None else (),
                prompt_logprobs=prompts.get(index, ()),
                error=error,
            )
        )
    return results
