"""What the engine tells of itself, as metrics."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from model_runner.info import LearningStats, RunnerInfo, SpeculationStats
from scheduler.interface import STEP_TOKENS, EngineStats
from server.engine.client import EngineClient, EngineState, EngineUnavailableError
from server.telemetry.families import Families

_BY_METHOD: Sequence[tuple[str, str, Callable[[SpeculationStats], float]]] = (
    ("num_drafts", "Steps of single choices that verified drafts.", lambda stats: stats.steps),
    ("num_emitted_tokens", "Tokens that these steps generated.", lambda stats: stats.tokens),
    ("num_draft_tokens", "Draft tokens verified.", lambda stats: stats.drafted),
    ("num_accepted_tokens", "Draft tokens accepted.", lambda stats: sum(stats.accepted_by_depth)),
    ("draft_seconds", "Time spent on making drafts.", lambda stats: stats.draft_s),
    ("verify_seconds", "Time spent on the forward passes that verified drafts.", lambda stats: stats.verify_s),
)
_BY_POSITION: Sequence[tuple[str, str, Callable[[SpeculationStats], Sequence[int]]]] = (
    (
        "num_draft_tokens_per_pos",
        "Times that a draft was there, and all before it accepted.",
        lambda stats: stats.verified_by_depth,
    ),
    ("num_accepted_tokens_per_pos", "Draft tokens accepted, by position.", lambda stats: stats.accepted_by_depth),
)
_OF_LEARNING: Sequence[tuple[str, str, Callable[[LearningStats], float]]] = (
    ("tokens", "Tokens of answers that heads were trained on, or will be.", lambda stats: stats.tokens),
    ("pieces_dropped", "Parts of answers that came too fast to be learnt from.", lambda stats: stats.pieces_dropped),
    ("steps", "Steps of training heads.", lambda stats: stats.steps),
    ("publications", "Heads that were put to use because they were better.", lambda stats: stats.publications),
    ("rollbacks", "Times that older heads were put to use again.", lambda stats: stats.rollbacks),
)


class EngineCollector(Collector):
    """Reads the engine's last snapshot whenever the metrics are asked for."""

    def __init__(self, engine: EngineClient, families: Families) -> None:
        self._engine = engine
        self._families = families

    def collect(self) -> Iterator[Metric]:
        make, stats = self._families, self._engine.stats
        yield self._state()
        yield self._cache_config()
        yield from self._queues(stats)
        yield make.gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", stats.kv_usage)
        yield self._cache_blocks(stats)
        yield make.counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prefix_queries)
        yield make.counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.prefix_hits)
        text = "Choices put back into the queue: for want of memory, or those of batches, to make way."
        yield make.counter("num_preemptions", text, stats.preemptions)
        yield make.counter("out_of_memory_steps", "Steps for which memory ran out, done again.", stats.out_of_memory)
        yield make.counter("engine_steps", "Steps of the engine.", stats.steps)
        yield make.counter("scheduled_tokens", "Tokens computed, recomputation included.", stats.scheduled_tokens)
        text = "Tokens computed in a step, drafts not included."
        yield make.histogram("iteration_tokens_total", text, STEP_TOKENS, stats.steps_by_tokens, stats.scheduled_tokens)
        yield make.counter("engine_restarts", "Times the engine was started again.", self._engine.num_restarts)
        yield from speculation_metrics(stats.speculation, make)
        yield from learning_metrics(stats.learning, make)

    def _state(self) -> Metric:
        states: dict[tuple[str, ...], float] = {(state.value,): state is self._engine.state for state in EngineState}
        return self._families.gauges("engine_state", "1 for the state it is in.", ["state"], states)

    def _cache_config(self) -> Metric:
        """Nothing before the engine has been ready once."""
        try:
            config = _describe_cache(self._engine.info)
        except EngineUnavailableError:
            config = {}
        text = "Always 1; its labels tell how large the KV cache is."
        values = {tuple(config.values()): 1.0} if config else {}
        return self._families.gauges("cache_config_info", text, list(config), values)

    def _cache_blocks(self, stats: EngineStats) -> Metric:
        """Nothing before the engine has been ready once."""
        by_state: dict[tuple[str, ...], float] = {}
        with suppress(EngineUnavailableError):
            held, cached = stats.kv_held_blocks, stats.kv_cached_blocks
            free = self._engine.info.num_blocks - held - cached
            by_state = {("held",): held, ("cached",): cached, ("free",): free}
        text = "Blocks of the KV cache: held by running choices; cached, which make way when needed; or free."
        return self._families.gauges("kv_cache_blocks", text, ["state"], by_state)

    def _queues(self, stats: EngineStats) -> Iterator[Metric]:
        """Autoscalers and routers take what runs and waits for load, so what delays nobody is told apart."""
        make, engine = self._families, self._engine
        running = stats.num_running - stats.num_background_running
        capacity, deferred = (
            stats.num_waiting - stats.num_background_waiting,
            engine.num_held - engine.num_background_held,
        )
        background = stats.num_background_waiting + engine.num_background_held
        text = "Choices that the engine computes now, those of batches left out."
        yield make.gauge("num_requests_running", text, running)
        text = "Choices of batches that it computes now; they make way for others."
        yield make.gauge("num_background_running", text, stats.num_background_running)
        text = "Choices that wait for the engine, those of batches left out."
        yield make.gauge("num_requests_waiting", text, capacity + deferred)
        text = "By why: capacity, for a place; deferred, for an engine that restarts; background, those of batches."
        by_reason: dict[tuple[str, ...], float] = {
            ("capacity",): capacity,
            ("background",): background,
            ("deferred",): deferred,
        }
        yield make.gauges("num_requests_waiting_by_reason", text, ["reason"], by_reason)
        yield make.gauge("num_requests_held", "Those that are deferred.", deferred)


def _describe_cache(info: RunnerInfo) -> dict[str, str]:
    """With vLLM's names: routers read them, and the blocks are `gpu` blocks there wherever they are."""
    return {
        "block_size": str(info.block_size),
        "num_gpu_blocks": str(info.num_blocks),
        "kv_cache_size_tokens": str(info.block_size * info.num_blocks),
        "cache_dtype": info.kv_dtype,
    }


def speculation_metrics(methods: Sequence[SpeculationStats], make: Families) -> Iterator[Metric]:
    """What each method of speculation did. Position 0 is the first draft token after the last known one.

    Tokens per step: emitted_tokens / drafts. Acceptance at a position: accepted_tokens_per_pos / draft_tokens_per_pos.
    """
    for name, text, value in _BY_METHOD:
        by_method: dict[tuple[str, ...], float] = {(stats.method,): value(stats) for stats in methods}
        yield make.counters(f"spec_decode_{name}", text, ["method"], by_method)
    for name, text, values in _BY_POSITION:
        by_position: dict[tuple[str, ...], float] = {
            (stats.method, str(position)): count for stats in methods for position, count in enumerate(values(stats))
        }
        yield make.counters(f"spec_decode_{name}", text, ["method", "position"], by_position)


def learning_metrics(stats: LearningStats | None, make: Families) -> Iterator[Metric]:
    """What came of `--learn`; nothing without it. `first` are the heads of the engine's start."""
    for name, text, value in _OF_LEARNING:
        yield make.counters(f"learning_{name}", text, [], {} if stats is None else {(): value(stats)})
    text = "What these heads bring on what is served lately, as measured before it is trained on."
    known: dict[tuple[str, ...], float | None] = {}
    if stats is not None:
        known = {("first",): stats.tokens_per_step_first, ("current",): stats.tokens_per_step_current}
    values = {heads: per_step for heads, per_step in known.items() if per_step is not None}
    yield make.gauges("learning_tokens_per_step", text, ["heads"], values)
