"""Real engines on tiny models and on the embedded one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

from bench import tiny_models
from bench.shared_runner import SharedRunner
from bench.speculation_matrix import FEATURES, Feature, Matrix
from model_runner.config import InputType, Quantization, RunnerConfig
from model_runner.contract import Failure, SamplingParams, StepPlan, TokenLogprobs
from model_runner.runner import ModelRunner
from model_runner.speculative.proposer import Proposer
from scheduler.engine import Engine
from scheduler.interface import ChoiceHistory, EngineRequest, FinishReason, SchedulerConfig
from scheduler.scheduler import Scheduler
from tests import tiny_vocabulary
from tests.conftest import VOCAB_SIZE, give_back_memory
from tests.engine import tiny_heads
from tests.engine.swapping import SwappingLink, load_swapping

SMALL_VOCAB = 24
"""So few tokens that outputs of a random model repeat themselves, and there is something to guess."""
GREEDY = SamplingParams(temperature=0.0, logprobs=3, stop_token_ids=(2,))


@dataclass
class Answer:
    """All that came back for one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached: int = 0
    finish_reason: FinishReason | None = None
    num_accepted: int = 0
    num_rejected: int = 0
    sampler_states: list[float | None] = field(default_factory=list)
    """One for each output."""
    error: Failure | None = None
    pooled: bytes = b""
    history: ChoiceHistory | None = field(default=None, compare=False)
    """Has times, of which no two are the same."""


RECURRENT = ("falcon_h1", "jamba", "kimi_linear", "lfm2_moe", "mamba", "qwen3_5_text")
"""Families with recurrent layers: Mamba 2 next to attention, Mamba with and without attention, KDA, short convolutions
with experts, delta nets."""
INDEXED = ("deepseek_v32", "deepseek_v4", "minimax_m3_vl_text", "qwen4_exp_text")
"""Families with indexers: of latents, of compressed entries, by blocks for each key-value head, and by blocks of pooled
keys next to gated delta nets and n-grams."""


@dataclass
class Harness:
    """A runner, and engines with different limits around it."""

    runner: ModelRunner
    has_aux_model: bool = False
    swapping: SwappingLink | None = None
    """If its heads change as it runs."""
    known: set[str] = field(default_factory=set)

    def engine(
        self,
        *,
        chunk: int = 512,
        num_blocks: int | None = None,
        prefix_caching: bool = True,
        max_num_seqs: int = 32,
    ) -> Engine:
        """A fresh engine, with an empty prefix cache, at most `num_blocks` blocks and `chunk` tokens in a step."""
        info = self.runner.info
        config = SchedulerConfig(
            block_size=info.block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=chunk,
            max_model_len=info.max_model_len,
            sees_images=info.sees_images,
            prefix_caching=prefix_caching,
        )
        runner = SharedRunner(self.runner, num_blocks or info.num_blocks, self.known)
        return Engine(Scheduler(config, runner.num_blocks, groups=runner.groups, images=runner.images), runner)

    def matrix(self, features: Mapping[str, Feature] = FEATURES) -> Matrix:
        """Methods by features, on fresh engines."""
        info = self.runner.info
        return Matrix(
            lambda chunk, num_blocks: self.engine(chunk=chunk, num_blocks=num_blocks),
            info.num_blocks,
            info.block_size,
            info.vocab_size,
            features,
        )

    def add_proposer(self, method: str, proposer: Proposer) -> None:
        """Let requests name another method of speculation."""
        self.runner._speculator.add(method, proposer)

    def forget(self) -> None:
        """Have the runner release what it still knows."""
        self.runner._state.apply(StepPlan(tuple(self.known), (), (), ()))
        self.known.clear()

    def run(
        self, engine: Engine, requests: Sequence[EngineRequest], *, may_fail: bool = False
    ) -> dict[tuple[str, int], Answer]:
        """Run the requests to their end."""
        answers: dict[tuple[str, int], Answer] = {}
        for request in requests:
            engine.add(request)
            answers |= {(request.request_id, choice.index): Answer(list(choice.output)) for choice in request.choices}
        waiting = set(answers)
        while waiting:
            for output in engine.step():
                key = output.request_id, output.choice
                answer = answers[key]
                if not answer.logprobs:
                    answer.num_cached = output.num_cached_tokens
                answer.tokens += output.tokens
                answer.logprobs += output.logprobs
                answer.prompt_logprobs += output.prompt_logprobs
                answer.num_accepted += output.num_accepted
                answer.num_rejected += output.num_rejected
                answer.sampler_states.append(output.sampler_state)
                answer.error = output.error
                answer.pooled += output.pooled
                assert may_fail or output.error is None, output.error
                if output.finish_reason is not None:
                    answer.finish_reason, answer.history = output.finish_reason, output.history
                    waiting.remove(key)
        engine.check_integrity()
        return answers


@pytest.fixture(scope="session")
def benched_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function from one of RECURRENT and INDEXED to a folder with a tiny random model of it."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            tiny_models.write_tiny_model(family, made[family])
            tiny_vocabulary.tokenizer(tiny_models.VOCAB_SIZE).save(str(made[family] / "tokenizer.json"))
        return made[family]

    return make


@pytest.fixture(scope="module")
def load(
    tiny_model: Callable[..., Path], benched_model: Callable[[str], Path], embedded_folder: Path
) -> Iterator[Callable[..., Harness]]:
    """Returns a function from a family's name, or "embedded", a quantization, a tiny model's size of vocabulary, what
    rows are rounded to, and numbers of choices and threads, to a harness with the model. Families of RECURRENT and
    INDEXED are allowed, too.

    A file's tests share them. To load tiny ones again takes less than to keep the memory of all.
    """
    made: dict[tuple[object, ...], Harness] = {}

    def make(
        family: str,
        quantization: Quantization = "auto",
        vocab_size: int = VOCAB_SIZE,
        rows: InputType = "auto",
        max_num_seqs: int = 32,
        threads: int = 1,  # two would wait for each other in the steps of tiny models
    ) -> Harness:
        is_benched = family in (*RECURRENT, *INDEXED)
        vocab_size = tiny_models.VOCAB_SIZE if is_benched else vocab_size
        key = (family, quantization, vocab_size, rows, max_num_seqs, threads)
        if key not in made:
            tiny = benched_model if is_benched else partial(tiny_model, vocab_size=vocab_size)
            config = RunnerConfig(
                model=embedded_folder if family == "embedded" else tiny(family),
                quantization=quantization,
                activation_type=rows,
                kv_cache_gib=0.3 if family == "embedded" else 0.08 if is_benched else 0.02,
                max_num_seqs=max_num_seqs + 2,
                threads=None if family == "embedded" else threads,
                aux_model=None if family == "embedded" else tiny_model("qwen3", vocab_size),
            )
            made[key] = Harness(ModelRunner.load(config), has_aux_model=config.aux_model is not None)
        return made[key]

    yield make
    made.clear()
    give_back_memory()


@pytest.fixture(scope="session")
def load_drafting(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Harness]:
    """Returns a function to a harness with a tiny model that speculates by every method; `swaps` has all of its heads
    change every few steps.
    """

    def make(write_eagle: Callable[[Path, int], Path], *, swaps: bool = False) -> Harness:
        torch.manual_seed(1)
        folder = tmp_path_factory.mktemp("heads")
        writers = {"medusa": tiny_heads.write_medusa, "hydra": tiny_heads.write_hydra, "eagle": write_eagle}
        heads = [write(folder / method, SMALL_VOCAB) for method, write in writers.items()]
        config = RunnerConfig(
            model=tiny_model("llama", SMALL_VOCAB),
            draft_model=tiny_model("qwen3", SMALL_VOCAB),
            aux_model=tiny_model("qwen3", SMALL_VOCAB),
            heads=tuple(heads),
            kv_cache_gib=0.02,
            max_num_seqs=34,
            learn=swaps,
        )
        if not swaps:
            return Harness(ModelRunner.load(config))
        of_vocab = {method: partial(write, vocab_size=SMALL_VOCAB) for method, write in writers.items()}
        runner, link = load_swapping(config, of_vocab, folder)
        return Harness(runner, swapping=link)

    return make
