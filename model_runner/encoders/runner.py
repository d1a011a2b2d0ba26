"""The runner of encoders: whole texts in, embeddings or class scores out."""

import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from model_runner.config import RunnerConfig
from model_runner.contract import AdmittedRequest, ChoiceResult, Pooling, SamplingParams, StepPlan, StepResult
from model_runner.encoders.folder import EncoderFolder
from model_runner.encoders.model import EncoderModel, EncoderShape, EncoderText
from model_runner.encoders.pooling import SentencePooling
from model_runner.model_needs import DoesNotFitError, ModelNeeds
from model_runner.platforms.cpu import CpuPlatform
from model_runner.platforms.memory import GIB, oom_reason
from model_runner.refusal import UnsupportedModelError
from model_runner.runner_interface import Runner, RunnerInfo
from model_runner.scoring.pooler import verdict_of
from model_runner.speculative.verify import Verdict
from model_runner.weights.safetensors_files import SafetensorsCheckpoint

logger = logging.getLogger("samewise.runner")

_PROCESS_BYTES = 152 << 20
"""Memory besides tensors of a process that has run steps, with transformers' encoders: 142 to 148 MiB measured."""
_FOR_OTHERS = ("draft_model", "heads", "aux_model", "learn", "kv_cache_gib", "kv_cache_dtype")
"""Settings for models that generate."""
_HIDDEN_COPIES, _WIDEST_COPIES = 11, 4
"""Temporaries of a step, as multiples of a token's hidden states, and of its numbers in the widest layer."""
_ONEDNN_SHARE = 1.3
"""Memory of linears that oneDNN packs, as a multiple of their weights."""
_CONVERTING_SHARE = 1.08
"""Memory of weights that are converted, as a multiple of their size in float32."""


@dataclass(slots=True)
class _Running:
    """A text that was admitted."""

    text: EncoderText
    pooling: Pooling
    num_missing: int
    """Tokens that were not scheduled yet."""

    @classmethod
    def of(cls, admitted: AdmittedRequest) -> "_Running":
        pooling = admitted.sampling.pooling
        assert pooling is not None, "`prepare` refuses all other requests"
        return cls(EncoderText(admitted.tokens, pooling.num_first), pooling, len(admitted.tokens))


class EncoderRunner(Runner):
    """Executes plans by encoding each text as a whole, in the step that schedules its last token.

    Nothing is kept between steps, so the blocks that a plan hands out stand for no memory: each is the place of one
    text. Steps that schedule a part of a text, and not its end, compute nothing for it.
    """

    def __init__(self, model: EncoderModel, pooling: SentencePooling | None, info: RunnerInfo) -> None:
        """`pooling` makes embeddings; None: the model's head makes scores."""
        self.info = info
        self.num_blocks = info.num_blocks
        self._model = model
        self._pooling = pooling
        self._running: dict[str, _Running] = {}

    @classmethod
    def load(cls, config: RunnerConfig, folder: EncoderFolder) -> "EncoderRunner":
        """Load the model on the CPU.

        Raises:
            DoesNotFitError: if the weights do not fit in memory.
            UnsupportedModelError: if the model is not supported, or mixes the texts of a batch.
            ValueError: if a setting is for models that generate.
        """
        _refuse_settings(config)
        start = time.perf_counter()
        platform = CpuPlatform(config)
        _check_loading(folder.path, platform.device_memory().free)
        model = EncoderModel(folder, platform.packer)
        pooling = None if folder.classifies else SentencePooling(folder.modules, model.config.hidden_size)
        info = _describe(config, folder, platform, model, pooling)
        logger.info("weights    %s as %s on cpu", f"{model.num_parameters:,}", info.dtype)
        what = "classes" if pooling is None else "numbers"
        logger.info(
            "encoder    %d %s of a text of at most %s tokens", info.hidden_size, what, f"{info.max_model_len:,}"
        )
        return cls(model, pooling, replace(info, started_in=(("weights", time.perf_counter() - start),)))

    def prepare(self, sampling: SamplingParams, num_choices: int) -> Future[None] | None:
        """Refuse all but this model's numbers."""
        wanted = "classes" if self._pooling is None else "modules"
        if sampling.pooling is not None and sampling.pooling.by == wanted:
            return None
        asked = "tokens" if sampling.pooling is None else f"pooling by {sampling.pooling.by}"
        failed: Future[None] = Future()
        failed.set_exception(ValueError(f"the model is an encoder, which gives pooling by {wanted}, not {asked}"))
        return failed

    def execute(self, plan: StepPlan) -> StepResult:
        """Encode all texts whose last token is scheduled."""
        for key in plan.released:
            self._running.pop(key, None)
        for admitted in plan.admitted:
            self._running[admitted.key] = _Running.of(admitted)
        scheduled = [(self._running[entry.key], entry.num_tokens) for entry in plan.scheduled]
        complete = [running for running, count in scheduled if running.num_missing == count]
        reason = ""
        try:
            numbers = self._compute([running.text for running in complete])
        except (MemoryError, RuntimeError) as error:
            reason = oom_reason(error)
        if reason:
            return StepResult((), out_of_memory=reason)
        for running, count in scheduled:
            running.num_missing -= count
        found = iter(numbers)
        verdicts = [
            Verdict() if running.num_missing else verdict_of(next(found).double().numpy(), running.pooling)
            for running, _ in scheduled
        ]
        results = zip(plan.keys, verdicts, strict=True)
        return StepResult(tuple(ChoiceResult(key, (), error=one.error, pooled=one.pooled) for key, one in results))

    def _compute(self, texts: Sequence[EncoderText]) -> Sequence[Tensor]:
        """The numbers of each text, before they are shortened and normalised."""
        if not texts:
            return []
        hidden = self._model.encode(texts)
        return self._model.classify(hidden) if self._pooling is None else self._pooling(hidden)

    def close(self) -> None:
        """Does nothing: nothing runs between steps."""


def _refuse_settings(config: RunnerConfig) -> None:
    """Raise ValueError for a setting that does not apply to encoders."""
    if config.device == "cuda":
        raise ValueError("encoders run on the CPU only; use --device cpu or auto")
    plain = RunnerConfig(config.model)
    if named := [name for name in _FOR_OTHERS if getattr(config, name) != getattr(plain, name)]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in named)
        raise ValueError(f"{config.model} is an encoder, which generates nothing and has no KV cache; remove {flags}")


def plan_encoder(config: RunnerConfig, folder: EncoderFolder, imported: int, free: int | None = None) -> ModelNeeds:
    """Plan the memory of an engine process with an encoder. Reads no weights.

    Weights that are stored in float32 stay in their file, and the packed linears are copies. All others are
    converted before any are packed, and little of what is freed then leaves the process.

    Args:
        config: the configuration.
        folder: the model.
        imported: private memory of a process that has only imported its modules.
        free: bytes that the process may take in all; None: what is free.

    Raises:
        DoesNotFitError, UnsupportedModelError, ValueError: as `EncoderRunner.load` does.
    """
    _refuse_settings(config)
    platform = CpuPlatform(config)
    process_bytes = imported + _PROCESS_BYTES
    free_now = platform.device_memory().free
    _check_loading(folder.path, free_now if free is None else free - process_bytes)
    shape = EncoderShape.of(folder)
    longest = _longest(config, folder, shape.max_tokens)
    sizes = platform.sizes(config)
    weights = _packed_bytes(shape, platform) + _converted_bytes(folder.path)
    row = (_HIDDEN_COPIES * shape.hidden + _WIDEST_COPIES * shape.widest) * torch.float32.itemsize
    return ModelNeeds(
        device="cpu",
        free_bytes=free_now,
        weight_bytes=weights,
        loading_bytes=weights,
        step_bytes=(longest + sizes.max_num_batched_tokens) * row,
        cache_bytes=0,
        image_bytes=0,
        learning_bytes=0,
        process_bytes=process_bytes,
        max_model_len=longest,
        num_tokens=longest * sizes.max_num_seqs,
        vocab_size=shape.vocab_size,
    )


def _packed_bytes(shape: EncoderShape, platform: CpuPlatform) -> int:
    """Memory of the linear layers, as they are packed."""
    packer = platform.packer
    if packer is None:
        return int(sum(map(math.prod, shape.linears)) * torch.float32.itemsize * _ONEDNN_SHARE)
    return sum(
        packer.kernels.packed_bytes(packer.kind_for(inputs), outputs, inputs) for outputs, inputs in shape.linears
    )


def _converted_bytes(folder: Path) -> int:
    """Memory of the weights that are not stored in float32, once they are."""
    stored = SafetensorsCheckpoint(folder).tensors.values()
    converted = [one for one in stored if one.dtype.is_floating_point and one.dtype is not torch.float32]
    return int(sum(math.prod(one.shape) for one in converted) * torch.float32.itemsize * _CONVERTING_SHARE)


def _check_loading(folder: Path, free: int) -> None:
    """Raise DoesNotFitError if the weights in float32 are more than what is free."""
    shapes = SafetensorsCheckpoint(folder).shapes
    if not shapes:
        raise UnsupportedModelError(f"{folder} has no safetensors; encoders are read from these files only")
    needed = sum(map(math.prod, shapes.values())) * torch.float32.itemsize
    if needed > free:
        raise DoesNotFitError(
            f"loading the weights takes {needed / GIB:.1f} GiB, but only {free / GIB:.1f} GiB are free; free some "
            "memory, or use a smaller model"
        )


def _longest(config: RunnerConfig, folder: EncoderFolder, most: int) -> int:
    """Tokens of the longest text, for a model of `most` positions. Raises ValueError if a longer one is configured."""
    longest = min(most, folder.max_tokens or most) if config.max_model_len is None else config.max_model_len
    if longest > most:
        raise ValueError(f"max_model_len {longest:,} is more than the model's own limit of {most:,}; lower it")
    return longest


def _describe(
    config: RunnerConfig,
    folder: EncoderFolder,
    platform: CpuPlatform,
    model: EncoderModel,
    pooling: SentencePooling | None,
) -> RunnerInfo:
    """Properties of the loaded model. Raises ValueError if the configured length is beyond its positions."""
    longest = _longest(config, folder, model.max_tokens)
    sizes = platform.sizes(config)
    return RunnerInfo(
        vocab_size=model.config.vocab_size,
        max_model_len=longest,
        num_blocks=sizes.max_num_seqs,
        block_size=longest,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        device="cpu",
        dtype=platform.types.weights or "float32",
        kv_dtype="none",
        kernels=platform.kernels,
        activation_type=platform.activation_type,
        hardware=platform.hardware,
        software=f"torch {torch.__version__}, transformers {version('transformers')}",
        hidden_size=model.config.num_labels if pooling is None else pooling.size,
        has_kv_cache=False,
    )
