"""Prometheus metrics under vLLM's names, so that dashboards for vLLM need at most another prefix."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from model_runner.runner_interface import LearningStats, RunnerInfo, SpeculationStats
from scheduler.interface import STEP_TOKENS, EngineStats
from server.engine.client import EngineClient, EngineState, EngineUnavailableError


def exposition(metrics: Iterable[Metric], *, of_tenants: bool) -> bytes:
    """The metrics in Prometheus's text format, with or without those that say what each tenant has used."""
    return generate_latest(_Page([one for one in metrics if of_tenants or not _tells_tenants_apart(one)]))


def _tells_tenants_apart(metric: Metric) -> bool:
    return any("tenant" in sample.labels for sample in metric.samples)


class _Page(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Sequence[Metric]:
        return self._metrics


class Families:
    """Makes metrics of one application. Their names are told without prefix; `model_name` is a label of each."""

    def __init__(self, prefix: str, model: str) -> None:
        self.model = model
        self._prefix = prefix

    def name(self, name: str) -> str:
        """With the prefix."""
        return f"{self._prefix}:{name}"

    def gauge(self, name: str, text: str, value: float) -> Metric:
        """A number that goes up and down."""
        return self.gauges(name, text, (), {(): value})

    def gauges(self, name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]) -> Metric:
        """Several by what the labels say, perhaps none."""
        family = GaugeMetricFamily(self.name(name), text, labels=["model_name", *labels])
        for of, value in values.items():
            family.add_metric([self.model, *of], value)
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        """A number that only grows, until a restart; its name gets `_total`."""
        return self.counters(name, text, (), {(): value})

    def counters(self, name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]) -> Metric:
        """Several by what the labels say, perhaps none."""
        family = CounterMetricFamily(self.name(name), text, labels=["model_name", *labels])
        for of, value in values.items():
            family.add_metric([self.model, *of], value)
        return family

    def histogram(self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
        """`counts` of the values up to each bound but no lower one, and of those above all; `total` is their sum."""
        family = HistogramMetricFamily(self.name(name), text, labels=["model_name"])
        names = [*(str(float(bound)) for bound in bounds), "+Inf"]
        family.add_metric([self.model], list(zip(names, accumulate(counts), strict=True)), total)
        return family


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpRequests:
    """By method, route and status; clients can make up methods, so what is none of the usual ones is `other`."""

    def __init__(self, families: Families, registry: CollectorRegistry) -> None:
        name = families.name("http_requests")
        self._counter = Counter(name, "HTTP requests.", ["method", "handler", "status"], registry=registry)

    def observe(self, method: str, handler: str, status: int) -> None:
        """One of them is over."""
        self._counter.labels(method if method in _METHODS else "other", handler, str(status)).inc()


_BETWEEN_TOKENS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)


class GeneratedTokens(Collector):
    """Counts the tokens and the time between them. A counter and a histogram of the library would take as long for each
    token as all else that is done for it.
    """

    def __init__(self, families: Families) -> None:
        self._families = families
        self._num_tokens = 0
        self._counts = [0] * (len(_BETWEEN_TOKENS_S) + 1)
        self._seconds = 0.0

    def observe(self, count: int, seconds: float | None) -> None:
        """`count` tokens of a choice came together, `seconds` after the ones before; None for the first."""
        self._num_tokens += count
        if seconds is not None:
            self._counts[bisect_left(_BETWEEN_TOKENS_S, seconds / count)] += count
            self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        yield self._families.counter("generation_tokens", "Tokens generated.", self._num_tokens)
        name, text = "inter_token_latency_seconds", "Between tokens of a choice."
        yield self._families.histogram(name, text, _BETWEEN_TOKENS_S, self._counts, self._seconds)


EndReason = Literal["stop", "length", "tool_calls", "abort", "error", "timeout"]
"""Why a choice ended; `abort`: the client left, or there was no room for another prompt of its request."""

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)
_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_PHASE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, *_REQUEST_S)
"""Of a request that is short, or waits for nothing, as well."""
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_CHOICES = (1, 2, 5, 10, 20, 50, 128)


class Metrics:
    """The metrics of one application, in a registry of their own."""

    def __init__(self, engine: EngineClient, model: str, prefix: str) -> None:
        """All names begin with the prefix and a colon; it has letters, digits and `_`, no digit first."""
        self._registry = CollectorRegistry()
        self._model = model
        self._families = Families(prefix, model)
        self._registry.register(EngineCollector(engine, self._families))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self.generated = GeneratedTokens(self._families)
        self._registry.register(self.generated)
        self._make_counters()
        self._make_histograms()

    def _make_counters(self) -> None:
        self._prompt_tokens_total = self._counter(
            "prompt_tokens", "Prompt tokens of the requests that the engine took."
        )
        self._cached_tokens_total = self._counter(
            "prompt_tokens_cached", "Those of them that it found in the prefix cache."
        )
        self._sources = self._counter_of("prompt_tokens_by_source", "Prompt tokens by where they came from.", "source")
        text = "Choices that ended, by reason; abort: the client left, or there was no room for all of its request."
        self._success = self._counter_of("request_success", text, "finished_reason")
        for reason in get_args(EndReason):
            self._success.labels(self._model, reason)  # so that the first one is an increase
        self._http = HttpRequests(self._families, self._registry)
        self._usage = self._counter_of("tenant_tokens", "Tokens of ended requests, by key.", "tenant", "kind")
        self._usage_requests = self._counter_of("tenant_requests", "Ended requests, by key.", "tenant")

    def _make_histograms(self) -> None:
        make = self._histogram
        self._first_token = make("time_to_first_token_seconds", "From request to first token.", _FIRST_TOKEN_S)
        text = "Between tokens, the mean of a choice that has at least two."
        self._per_token = make("request_time_per_output_token_seconds", text, _PER_TOKEN_S)
        self._latency = make("e2e_request_latency_seconds", "From request to last token.", _REQUEST_S)
        self._queue = make("request_queue_time_seconds", "From when the engine took it to its first step.", _PHASE_S)
        self._prefill = make("request_prefill_time_seconds", "From its first step to its first token.", _PHASE_S)
        self._decode = make("request_decode_time_seconds", "From its first token to its last.", _PHASE_S)
        self._inference = make("request_inference_time_seconds", "From its first step to its last token.", _PHASE_S)
        self._prompt_length = make("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        text = "Prompt tokens of a request that were not in the prefix cache."
        self._computed_length = make("request_prefill_kv_computed_tokens", text, _TOKENS)
        self._generated_length = make("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        text = "Generated tokens of the longest choice of a request."
        self._longest_choice_length = make("request_max_num_generation_tokens", text, _TOKENS)
        self._max_tokens = make("request_params_max_tokens", "max_tokens of a request.", _TOKENS)
        self._n = make("request_params_n", "n of a request.", _CHOICES)

    def observe_http(self, method: str, handler: str, status: int) -> None:
        self._http.observe(method, handler, status)

    def observe_start(self, prompt_tokens: int, max_tokens: int, n: int) -> None:
        """The engine has taken a prompt."""
        self._prompt_tokens_total.inc(prompt_tokens)
        self._prompt_length.observe(prompt_tokens)
        self._max_tokens.observe(max_tokens)
        self._n.observe(n)

    def observe_prefill(self, prompt_tokens: int, cached_tokens: int) -> None:
        """The engine has been through a prompt, of which so much was in the prefix cache."""
        self._cached_tokens_total.inc(cached_tokens)
        self._sources.labels(self._model, "local_cache_hit").inc(cached_tokens)
        self._sources.labels(self._model, "local_compute").inc(prompt_tokens - cached_tokens)
        self._computed_length.observe(prompt_tokens - cached_tokens)

    def observe_usage(self, tenant: str, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """A request of the tenant with this label has ended; those that were cached are among the prompt's."""
        self._usage_requests.labels(self._model, tenant).inc()
        kinds = {"prompt": prompt_tokens, "cached": cached_tokens, "completion": completion_tokens}
        for kind, count in kinds.items():
            self._usage.labels(self._model, tenant, kind).inc(count)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def observe_choice_end(self, reason: EndReason) -> None:
        self._success.labels(self._model, reason).inc()

    def observe_time_per_output_token(self, seconds: float) -> None:
        """A choice with at least two tokens has ended: from its first to its last, divided by those after the first."""
        self._per_token.observe(seconds)

    def observe_end(self, seconds: float, generated: Sequence[int]) -> None:
        """All choices of a request have ended, with so many tokens each."""
        self._latency.observe(seconds)
        self._generated_length.observe(sum(generated))
        self._longest_choice_length.observe(max(generated))

    def observe_phases(self, queue_s: float, prefill_s: float | None, decode_s: float | None) -> None:
        """A request that somebody waited for has ended: how long it waited in the engine, until its first token then,
        and from there to its last; None for what it did not come to. Preemptions count where they fall.
        """
        self._queue.observe(queue_s)
        if prefill_s is not None:
            self._prefill.observe(prefill_s)
            self._inference.observe(prefill_s + (decode_s or 0.0))
        if decode_s is not None:
            self._decode.observe(decode_s)

    def collect(self) -> Sequence[Metric]:
        """All of them as they are now, for whoever renders those of several servers."""
        return list(self._registry.collect())

    def render(self, *, of_tenants: bool) -> bytes:
        """The exposition format of Prometheus, with or without what each tenant has used."""
        return exposition(self.collect(), of_tenants=of_tenants)

    def _counter(self, name: str, text: str) -> Counter:
        return self._counter_of(name, text).labels(self._model)

    def _counter_of(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(self._families.name(name), text, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        name = self._families.name(name)
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry).labels(self._model)


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
