"""Prometheus metrics under vLLM's names, so that dashboards for vLLM need at most another prefix."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from model_runner.runner_interface import ImageStats, LearningStats, RunnerInfo, SpeculationStats
from scheduler.interface import STEP_TOKENS, EngineStats
from server.engine.client import EngineClient, EngineState, EngineUnavailableError
from server.models.hosted_model import HostedModel, Leaving
from server.models.residence import Shared, Standing


def exposition(metrics: Iterable[Metric], *, of_tenants: bool) -> bytes:
    """The metrics in Prometheus's text format, with or without the ones that show each tenant's usage."""
    return generate_latest(_Page([one for one in metrics if of_tenants or not _has_tenant_label(one)]))


def _has_tenant_label(metric: Metric) -> bool:
    return any("tenant" in sample.labels for sample in metric.samples)


class _Page(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Sequence[Metric]:
        return self._metrics


class Families:
    """Makes the metrics of one application: adds the prefix to names, and the label `model_name`."""

    def __init__(self, prefix: str, model: str) -> None:
        self.model = model
        self._prefix = prefix

    def name(self, name: str) -> str:
        """The name with the prefix."""
        return f"{self._prefix}:{name}"

    def gauge(self, name: str, text: str, value: float) -> Metric:
        """A number that goes up and down."""
        return self.gauges(name, text, (), {(): value})

    def gauges(self, name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]) -> Metric:
        """A gauge with labels: one value for each tuple of labels, perhaps none."""
        family = GaugeMetricFamily(self.name(name), text, labels=["model_name", *labels])
        for of, value in values.items():
            family.add_metric([self.model, *of], value)
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        """A number that only grows until a restart. Its name gets the suffix `_total`."""
        return self.counters(name, text, (), {(): value})

    def counters(self, name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]) -> Metric:
        """A counter with labels: one value for each tuple of labels, perhaps none."""
        family = CounterMetricFamily(self.name(name), text, labels=["model_name", *labels])
        for of, value in values.items():
            family.add_metric([self.model, *of], value)
        return family

    def histogram(self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
        """`counts` has the values in each bucket, and last those above all bounds; `total` is their sum."""
        family = HistogramMetricFamily(self.name(name), text, labels=["model_name"])
        names = [*(str(float(bound)) for bound in bounds), "+Inf"]
        family.add_metric([self.model], list(zip(names, accumulate(counts), strict=True)), total)
        return family


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpRequests:
    """HTTP requests by method, route and status. Clients can invent methods, so unusual ones count as `other`."""

    def __init__(self, families: Families, registry: CollectorRegistry) -> None:
        name = families.name("http_requests")
        self._counter = Counter(name, "HTTP requests.", ["method", "handler", "status"], registry=registry)

    def observe(self, method: str, handler: str, status: int) -> None:
        """Count a request that has ended."""
        self._counter.labels(method if method in _METHODS else "other", handler, str(status)).inc()


_BETWEEN_TOKENS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)


class GeneratedTokens(Collector):
    """Counts generated tokens and the time between them.

    The library's counter and histogram would take as long for each token as all its other processing.
    """

    def __init__(self, families: Families) -> None:
        self._families = families
        self._num_tokens = 0
        self._counts = [0] * (len(_BETWEEN_TOKENS_S) + 1)
        self._seconds = 0.0

    def observe(self, count: int, seconds: float | None) -> None:
        """`count` tokens of a choice arrived together, `seconds` after the previous ones; None for the first."""
        self._num_tokens += count
        if seconds is not None:
            self._counts[bisect_left(_BETWEEN_TOKENS_S, seconds / count)] += count
            self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        yield self._families.counter("generation_tokens", "Tokens generated.", self._num_tokens)
        name, text = "inter_token_latency_seconds", "Time between tokens of a choice."
        yield self._families.histogram(name, text, _BETWEEN_TOKENS_S, self._counts, self._seconds)


EndReason = Literal["stop", "length", "tool_calls", "abort", "error", "timeout"]
"""Why a choice ended; `abort`: the client left, or another prompt of its request found the queue full."""

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)
_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_PHASE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, *_REQUEST_S)
"""Buckets for phases, which are much shorter for short requests and for ones that need not wait."""
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_CHOICES = (1, 2, 5, 10, 20, 50, 128)


class ServerMetrics:
    """The metrics that belong to no model: HTTP requests, the process and its interpreter."""

    def __init__(self, prefix: str, shared: Callable[[], Shared] | None = None) -> None:
        """The names of metrics of our own begin with the prefix and a colon.

        `shared` gives what several models share at the moment; None with one model.
        """
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        if shared is not None:
            text = "Memory that all models together may take. Several models only."
            budget = Gauge(f"{prefix}:model_budget_bytes", text, registry=self._registry)
            budget.set_function(lambda: shared().budget)
            text = "1 while a process that has imported everything waits for the next load. Several models only."
            spare = Gauge(f"{prefix}:model_spare_ready", text, registry=self._registry)
            spare.set_function(lambda: shared().has_spare)
        self._http = HttpRequests(Families(prefix, ""), self._registry)

    def observe_http(self, method: str, handler: str, status: int) -> None:
        self._http.observe(method, handler, status)

    def collect(self) -> Sequence[Metric]:
        """The current metrics."""
        return list(self._registry.collect())


def joined(metrics: Iterable[Metric]) -> list[Metric]:
    """Metrics of several models, with one family for each name."""
    families: dict[str, Metric] = {}
    for one in metrics:
        if one.name in families:
            families[one.name].samples.extend(one.samples)
        else:
            families[one.name] = one
    return list(families.values())


class Metrics:
    """The metrics of one model, in their own registry."""

    def __init__(self, engine: EngineClient, model: str, prefix: str) -> None:
        """All names begin with the prefix and a colon. The prefix has letters, digits and `_`, and no digit first."""
        self._registry = CollectorRegistry()
        self.model = model
        """The model's name."""
        self._families = Families(prefix, model)
        self._registry.register(EngineCollector(engine, self._families))
        if isinstance(engine, HostedModel):
            self._registry.register(ResidenceCollector(engine, self._families))
        self.generated = GeneratedTokens(self._families)
        self._registry.register(self.generated)
        self._make_counters()
        self._make_histograms()

    def _make_counters(self) -> None:
        self._prompt_tokens_total = self._counter(
            "prompt_tokens", "Prompt tokens of requests that the engine accepted."
        )
        self._cached_tokens_total = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        text = "Prompt tokens by source: computed or cached."
        self._sources = self._counter_of("prompt_tokens_by_source", text, "source")
        text = "Ended choices by reason; abort: the client left, or the queue had no room for the whole request."
        self._success = self._counter_of("request_success", text, "finished_reason")
        for reason in get_args(EndReason):
            self._success.labels(self.model, reason)  # at 0, so that the first choice shows as an increase
        self._usage = self._counter_of("tenant_tokens", "Tokens of ended requests, by key.", "tenant", "kind")
        self._usage_requests = self._counter_of("tenant_requests", "Ended requests, by key.", "tenant")

    def _make_histograms(self) -> None:
        make = self._histogram
        self._first_token = make("time_to_first_token_seconds", "Time from request to first token.", _FIRST_TOKEN_S)
        text = "Mean time between the tokens of a choice that has at least two."
        self._per_token = make("request_time_per_output_token_seconds", text, _PER_TOKEN_S)
        self._latency = make("e2e_request_latency_seconds", "Time from request to last token.", _REQUEST_S)
        self._queue = make("request_queue_time_seconds", "Time from arrival in the engine to the first step.", _PHASE_S)
        self._prefill = make("request_prefill_time_seconds", "Time from first step to first token.", _PHASE_S)
        self._decode = make("request_decode_time_seconds", "Time from first to last token.", _PHASE_S)
        self._inference = make("request_inference_time_seconds", "Time from first step to last token.", _PHASE_S)
        self._prompt_length = make("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        text = "Prompt tokens of a request that were not in the prefix cache."
        self._computed_length = make("request_prefill_kv_computed_tokens", text, _TOKENS)
        self._generated_length = make("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        text = "Generated tokens of the longest choice of a request."
        self._longest_choice_length = make("request_max_num_generation_tokens", text, _TOKENS)
        self._max_tokens = make("request_params_max_tokens", "max_tokens of a request.", _TOKENS)
        self._n = make("request_params_n", "n of a request.", _CHOICES)

    def observe_start(self, prompt_tokens: int, max_tokens: int, n: int) -> None:
        """The engine has accepted a prompt."""
        self._prompt_tokens_total.inc(prompt_tokens)
        self._prompt_length.observe(prompt_tokens)
        self._max_tokens.observe(max_tokens)
        self._n.observe(n)

    def observe_prefill(self, prompt_tokens: int, cached_tokens: int) -> None:
        """The engine has computed a prompt, except `cached_tokens` of it that were in the prefix cache."""
        self._cached_tokens_total.inc(cached_tokens)
        self._sources.labels(self.model, "local_cache_hit").inc(cached_tokens)
        self._sources.labels(self.model, "local_compute").inc(prompt_tokens - cached_tokens)
        self._computed_length.observe(prompt_tokens - cached_tokens)

    def observe_usage(self, tenant: str, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """A request of the tenant with this label has ended. `prompt_tokens` includes `cached_tokens`."""
        self._usage_requests.labels(self.model, tenant).inc()
        kinds = {"prompt": prompt_tokens, "cached": cached_tokens, "completion": completion_tokens}
        for kind, count in kinds.items():
            self._usage.labels(self.model, tenant, kind).inc(count)

    def observe_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def observe_choice_end(self, reason: EndReason) -> None:
        self._success.labels(self.model, reason).inc()

    def observe_time_per_output_token(self, seconds: float) -> None:
        """A choice with at least two tokens has ended; `seconds` is the mean time between them."""
        self._per_token.observe(seconds)

    def observe_end(self, seconds: float, generated: Sequence[int]) -> None:
        """All choices of a request have ended; `generated` has the number of tokens of each."""
        self._latency.observe(seconds)
        self._generated_length.observe(sum(generated))
        self._longest_choice_length.observe(max(generated))

    def observe_phases(self, queue_s: float, prefill_s: float | None, decode_s: float | None) -> None:
        """An interactive request has ended: the times in the queue, until the first token, and until the last.

        A phase that was not reached is None. Preemptions count in the phase in which they happen.
        """
        self._queue.observe(queue_s)
        if prefill_s is not None:
            self._prefill.observe(prefill_s)
            self._inference.observe(prefill_s + (decode_s or 0.0))
        if decode_s is not None:
            self._decode.observe(decode_s)

    def collect(self) -> Sequence[Metric]:
        """The current metrics."""
        return list(self._registry.collect())

    def _counter(self, name: str, text: str) -> Counter:
        return self._counter_of(name, text).labels(self.model)

    def _counter_of(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(self._families.name(name), text, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        name = self._families.name(name)
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry).labels(self.model)


_BY_METHOD: Sequence[tuple[str, str, Callable[[SpeculationStats], float]]] = (
    ("num_drafts", "Steps that verified drafts, counted for each choice.", lambda stats: stats.steps),
    ("num_emitted_tokens", "Tokens generated in steps that verified drafts.", lambda stats: stats.tokens),
    ("num_draft_tokens", "Draft tokens verified.", lambda stats: stats.drafted),
    ("num_accepted_tokens", "Draft tokens accepted.", lambda stats: sum(stats.accepted_by_depth)),
    ("draft_seconds", "Time spent drafting.", lambda stats: stats.draft_s),
    ("verify_seconds", "Time spent in forward passes that verified drafts.", lambda stats: stats.verify_s),
)
_BY_POSITION: Sequence[tuple[str, str, Callable[[SpeculationStats], Sequence[int]]]] = (
    (
        "num_draft_tokens_per_pos",
        "Draft tokens whose predecessors were all accepted, by position.",
        lambda stats: stats.verified_by_depth,
    ),
    ("num_accepted_tokens_per_pos", "Draft tokens accepted, by position.", lambda stats: stats.accepted_by_depth),
)
_OF_LEARNING: Sequence[tuple[str, str, Callable[[LearningStats], float]]] = (
    ("tokens", "Tokens of answers queued for training heads or already used.", lambda stats: stats.tokens),
    ("pieces_dropped", "Pieces of answers dropped: training was too slow.", lambda stats: stats.pieces_dropped),
    ("steps", "Training steps.", lambda stats: stats.steps),
    ("publications", "Times that better heads were put to use.", lambda stats: stats.publications),
    ("rollbacks", "Times that earlier heads were restored.", lambda stats: stats.rollbacks),
)


_OF_IMAGES: Sequence[tuple[str, str, Callable[[ImageStats], float]]] = (
    ("image_encoded", "Images whose features were computed, again included.", lambda stats: stats.encoded),
    ("image_encode_seconds", "Time spent on decoding images and computing features.", lambda stats: stats.encode_s),
    ("image_cache_hits", "Images whose features were in memory when a request needed them.", lambda stats: stats.hits),
)


class EngineCollector(Collector):
    """Collects metrics from the engine's last snapshot."""

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
        yield make.counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries)
        yield make.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits)
        text = "Choices put back into the queue: memory ran out, or a batch made way for interactive requests."
        yield make.counter("num_preemptions", text, stats.preemptions)
        yield make.counter("out_of_memory_steps", "Steps repeated because memory ran out.", stats.out_of_memory)
        yield make.counter("engine_steps", "Steps of the engine.", stats.steps)
        yield make.counter("scheduled_tokens", "Tokens computed, recomputation included.", stats.scheduled_tokens)
        text = "Tokens computed in a step, without drafts."
        yield make.histogram("iteration_tokens_total", text, STEP_TOKENS, stats.steps_by_tokens, stats.scheduled_tokens)
        yield make.counter("engine_restarts", "Restarts of the engine.", self._engine.num_restarts)
        yield from speculation_metrics(stats.speculation, make)
        yield from learning_metrics(stats.learning, make)
        yield from image_metrics(stats.images, make)

    def _state(self) -> Metric:
        states: dict[tuple[str, ...], float] = {(state.value,): state is self._engine.state for state in EngineState}
        return self._families.gauges("engine_state", "1 for the engine's current state, else 0.", ["state"], states)

    def _cache_config(self) -> Metric:
        """Empty until the engine has been ready once, and for encoders."""
        config: dict[str, str] = {}
        with suppress(EngineUnavailableError):
            if self._engine.info.has_kv_cache:
                config = _describe_cache(self._engine.info)
        text = "Always 1; the labels describe the KV cache."
        values = {tuple(config.values()): 1.0} if config else {}
        return self._families.gauges("cache_config_info", text, list(config), values)

    def _cache_blocks(self, stats: EngineStats) -> Metric:
        """Empty until the engine has been ready once, and for encoders."""
        by_state: dict[tuple[str, ...], float] = {}
        with suppress(EngineUnavailableError):
            info, held, cached = self._engine.info, stats.kv_held_blocks, stats.kv_cached_blocks
            free = info.num_blocks - held - cached
            if info.has_kv_cache:
                by_state = {("held",): held, ("cached",): cached, ("free",): free}
        text = "KV cache blocks by state: held by running choices, cached (evicted when needed), or free."
        return self._families.gauges("kv_cache_blocks", text, ["state"], by_state)

    def _queues(self, stats: EngineStats) -> Iterator[Metric]:
        """Autoscalers and routers read running and waiting choices as load, so batches are counted separately."""
        make, engine = self._families, self._engine
        running = stats.num_running - stats.num_background_running
        capacity, deferred = (
            stats.num_waiting - stats.num_background_waiting,
            engine.num_held - engine.num_background_held,
        )
        background = stats.num_background_waiting + engine.num_background_held
        text = "Running choices, without batches."
        yield make.gauge("num_requests_running", text, running)
        text = "Running choices of batches, which make way for others."
        yield make.gauge("num_background_running", text, stats.num_background_running)
        text = "Waiting choices, without batches."
        yield make.gauge("num_requests_waiting", text, capacity + deferred)
        text = (
            "Waiting choices by reason: capacity (no free place), deferred (the engine starts), background (batches)."
        )
        by_reason: dict[tuple[str, ...], float] = {
            ("capacity",): capacity,
            ("background",): background,
            ("deferred",): deferred,
        }
        yield make.gauges("num_requests_waiting_by_reason", text, ["reason"], by_reason)
        yield make.gauge(
            "num_requests_held",
            "Choices that wait for an engine that starts, again or for one of several models (deferred).",
            deferred,
        )


class ResidenceCollector(Collector):
    """Collects what the host of several models knows of one: its loads, who waits for it and its memory."""

    def __init__(self, model: HostedModel, families: Families) -> None:
        self._model = model
        self._families = families

    def collect(self) -> Iterator[Metric]:
        make, model = self._families, self._model
        yield make.counter("model_loads", "Times that the model was loaded. Several models only.", model.num_loads)
        text = "Time that these loads took. Several models only."
        yield make.counter("model_load_seconds", text, model.loads_s)
        text = "Times that the model was unloaded, or could not be loaded, by reason. Several models only."
        reasons: dict[tuple[str, ...], float] = {(reason.value,): model.unloads[reason] for reason in Leaving}
        yield make.counters("model_unloads", text, ["reason"], reasons)
        text = "Requests that wait until the model is loaded. Several models only."
        yield make.gauge("model_requests_waiting", text, len(model.waiters))
        status = model.status
        reserved = status.num_bytes if status.standing is not Standing.UNLOADED else 0
        text = "Memory that is reserved for the model, 0 while it is not loaded. Several models only."
        yield make.gauge("model_reserved_bytes", text, reserved or 0)


def _describe_cache(info: RunnerInfo) -> dict[str, str]:
    """The cache's sizes under vLLM's names, which routers read. There, blocks are `gpu` blocks on any device."""
    return {
        "block_size": str(info.block_size),
        "num_gpu_blocks": str(info.num_blocks),
        "kv_cache_size_tokens": str(info.block_size * info.num_blocks),
        "cache_dtype": info.kv_dtype,
    }


def speculation_metrics(methods: Sequence[SpeculationStats], make: Families) -> Iterator[Metric]:
    """Metrics of each speculation method. Position 0 is the first draft token after the last known token.

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
    """Metrics of `--learn`; empty without it. `first` are the heads from the engine's start."""
    for name, text, value in _OF_LEARNING:
        yield make.counters(f"learning_{name}", text, [], {} if stats is None else {(): value(stats)})
    text = "Tokens per step with these heads on recent answers, measured before training on them."
    known: dict[tuple[str, ...], float | None] = {}
    if stats is not None:
        known = {("first",): stats.tokens_per_step_first, ("current",): stats.tokens_per_step_current}
    values = {heads: per_step for heads, per_step in known.items() if per_step is not None}
    yield make.gauges("learning_tokens_per_step", text, ["heads"], values)


def image_metrics(stats: ImageStats | None, make: Families) -> Iterator[Metric]:
    """Metrics of images in prompts; empty for a model that takes none."""
    for name, text, value in _OF_IMAGES:
        yield make.counters(name, text, [], {} if stats is None else {(): value(stats)})
    text = "Images whose features requests are waiting for."
    yield make.gauges("images_waiting", text, [], {} if stats is None else {(): stats.waiting})
    text = "Memory of images' features by state: held by requests, or cached and evicted when needed."
    sizes: dict[tuple[str, ...], float] = {}
    if stats is not None:
        sizes = {("held",): stats.held_bytes, ("cached",): max(0, stats.cached_bytes - stats.held_bytes)}
    yield make.gauges("image_feature_bytes", text, ["state"], sizes)
