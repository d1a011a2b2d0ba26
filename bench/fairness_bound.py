"""Simulates the scheduler to find how much the services of two permanently waiting clients can differ.

The bound is theorem 4.4 in Sheng et al., arXiv:2401.00588. In any interval in which both clients always wait, their
services, each divided by its weight, differ by at most twice the larger of INPUT_COST * longest prompt and
OUTPUT_COST * maximum tokens in flight, divided by the smaller weight.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from model_runner.contract import ChoiceResult, SamplingParams, StepPlan, StepResult
from scheduler.interface import EngineRequest, Policy, SchedulerConfig
from scheduler.scheduler import Scheduler
from scheduler.waiting_queue import INPUT_COST, OUTPUT_COST

_WEIGHTS = (0.5, 1.0, 1.0, 2.0, 3.0)


@dataclass(frozen=True, slots=True)
class Client:
    """A client with random prompts and answers."""

    name: str
    weight: float
    prompts: tuple[int, int]
    """Shortest and longest prompt."""
    outputs: tuple[int, int]
    """Shortest and longest answer."""


@dataclass(frozen=True, slots=True)
class Run:
    """A simulated server and its clients."""

    config: SchedulerConfig
    num_blocks: int
    clients: Sequence[Client]
    visitors: Sequence[Client]
    """Clients that have waiting requests only at times."""
    num_steps: int

    @property
    def bound(self) -> float:
        """Upper bound of the difference between two clients' services, each divided by its weight."""
        longest = max(client.prompts[1] for client in (*self.clients, *self.visitors))
        most_running = self.num_blocks * self.config.block_size
        lightest = min(client.weight for client in self.clients)
        return 2 * max(INPUT_COST * longest, OUTPUT_COST * most_running) / lightest


def random_run(pick: random.Random, policy: Policy) -> Run:
    """A random run that takes only a few milliseconds."""
    block_size, max_len = pick.choice((4, 8)), 32
    num_blocks = max_len // block_size * pick.randint(2, 5)
    config = SchedulerConfig(block_size, pick.randint(2, 8), pick.randint(8, 64), max_len, policy)
    clients = [_client(pick, f"client {index}") for index in range(pick.randint(2, 4))]
    visitors = [_client(pick, f"visitor {index}") for index in range(pick.randint(0, 3))]
    return Run(config, num_blocks, clients, visitors, num_steps=pick.randint(40, 120))


def _client(pick: random.Random, name: str) -> Client:
    prompts, outputs = sorted(pick.choices(range(1, 17), k=2)), sorted(pick.choices(range(1, 17), k=2))
    return Client(name, pick.choice(_WEIGHTS), (prompts[0], prompts[1]), (outputs[0], outputs[1]))


@dataclass(slots=True)
class _Server:
    """The real scheduler with a simulated model."""

    run: Run
    pick: random.Random
    scheduler: Scheduler = field(init=False)
    service: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    """By client: number of requests that have not been admitted yet."""
    _clients: dict[str, str] = field(default_factory=dict)
    """Client by request."""
    _unread: dict[str, int] = field(default_factory=dict)
    """By running choice: number of known tokens that still have to be computed."""
    _seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.run.config, self.run.num_blocks)

    def send(self, client: Client) -> None:
        """Add a request of this client."""
        name = f"r{len(self._clients)}"
        prompt = tuple(self.pick.choices(range(1000), k=self.pick.randint(*client.prompts)))
        self._clients[name] = client.name
        self.waiting[client.name] = self.waiting.get(client.name, 0) + 1
        max_tokens = self.pick.randint(*client.outputs)
        self.scheduler.add(
            EngineRequest(name, prompt, SamplingParams(), max_tokens, client=client.name, weight=client.weight)
        )

    def step(self) -> None:
        """Run one step and record the services."""
        plan = self.scheduler.schedule()
        self._book_prompts(plan)
        for output in self.scheduler.update(plan, self._result(plan)):
            self._serve(output.request_id, OUTPUT_COST * len(output.tokens))

    def _book_prompts(self, plan: StepPlan) -> None:
        for admitted in plan.admitted:
            self._unread[admitted.key] = len(admitted.tokens) - admitted.num_computed
            name = admitted.key.rpartition("/")[0]
            if name not in self._seen:
                self._seen.add(name)
                self.waiting[self._clients[name]] -= 1
                self._serve(name, INPUT_COST * self._unread[admitted.key])

    def _result(self, plan: StepPlan) -> StepResult:
        choices = []
        for share in plan.scheduled:
            self._unread[share.key] -= share.num_tokens
            answers = not self._unread[share.key]
            self._unread[share.key] += answers
            choices.append(ChoiceResult(share.key, (0,) if answers else ()))
        return StepResult(tuple(choices))

    def _serve(self, name: str, service: float) -> None:
        client = self._clients[name]
        self.service[client] = self.service.get(client, 0.0) + service


def greatest_difference(run: Run, pick: random.Random) -> float:
    """The largest difference between two clients' services, each divided by its weight, in any interval of the run."""
    server = _Server(run, pick)
    histories: dict[str, list[float]] = {client.name: [] for client in run.clients}
    for _ in range(run.num_steps):
        for client in run.clients:
            while server.waiting.get(client.name, 0) < run.config.max_num_seqs + 1:  # more than one step can admit
                server.send(client)
        for visitor in run.visitors:
            if pick.random() < 0.1:
                for _ in range(pick.randint(1, 6)):
                    server.send(visitor)
        server.step()
        for client in run.clients:
            histories[client.name].append(server.service.get(client.name, 0.0) / client.weight)
    return _greatest(histories)


def _greatest(histories: Mapping[str, Sequence[float]]) -> float:
    return max(_range(a - b for a, b in zip(*pair, strict=True)) for pair in combinations(histories.values(), 2))


def _range(values: Iterable[float]) -> float:
    """Largest minus smallest value, which is the change of the difference in the worst interval."""
    seen = [0.0, *values]
    return max(seen) - min(seen)


def worst_of(num_runs: int, policy: Policy, seed: int = 0) -> float:
    """The largest difference in `num_runs` random runs, divided by the bound."""
    pick = random.Random(seed)
    runs = (random_run(pick, policy) for _ in range(num_runs))
    return max(greatest_difference(run, pick) / run.bound for run in runs)
