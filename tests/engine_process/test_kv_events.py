"""From the engine to routers: what these know is what the engine's prefix cache holds."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial

import msgspec
import pytest

from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams
from scheduler.interface import ChoiceState, EngineRequest, RequestOutput
from scheduler.prefix_cache import AllBlocksCleared, BlockRemoved, BlockStored
from server.engine.client import RequestFailedError
from server.engine.kv_events import block_hash, encode_batch
from server.engine.kv_publisher import KVPublisher
from server.engine.messages import EngineConfig
from server.engine.process import EngineProcess, ProcessLink
from tests.engine_process import cached_engine
from tests.engine_process.cached_engine import BLOCK_SIZE, CRASH, NUM_BLOCKS
from tests.engine_process.conftest import LIMITS
from tests.engine_process.inprocess import InProcessEngine
from tests.engine_process.outputs import outputs_of
from tests.engine_process.router import Router
from tests.engine_process.router import in_step as router_in_step
from tests.waiting import until

LOCAL = "tcp://127.0.0.1:*"


def name(index):
    return bytes(23) + bytes([9]) + index.to_bytes(8, "big")


# -- the form ----------------------------------------------------------------------------------------------------------


def test_the_form_is_that_of_vllm():
    """Fields and their order equal vLLM's `kv_events.py`, up to `lora_name`."""
    large = 2**64 - 1
    events = [
        AllBlocksCleared(),
        BlockStored(name(1), None, (10, 11)),
        BlockStored(name(large), name(1), (12, 13)),
        BlockRemoved(name(large)),
        BlockRemoved(name(1)),
    ]
    assert msgspec.msgpack.decode(encode_batch(events, 1234.5)) == [
        1234.5,
        [
            ["AllBlocksCleared"],
            ["BlockStored", [1, large], None, [10, 11, 12, 13], 2, None, "GPU", None],
            ["BlockRemoved", [large, 1], "GPU"],
        ],
        0,
    ]


def test_blocks_that_do_not_follow_each_other_have_events_of_their_own():
    stored = [(1, None), (2, 1), (3, 1), (4, None), (5, 4)]
    events = [BlockStored(name(one), parent and name(parent), (one,)) for one, parent in stored]
    events.insert(2, BlockRemoved(name(2)))
    _, written, _ = msgspec.msgpack.decode(encode_batch(events, 0.0))
    assert [event[:4] for event in written] == [
        ["BlockStored", [1, 2], None, [1, 2]],
        ["BlockRemoved", [2], "GPU"],
        ["BlockStored", [3], 1, [3]],
        ["BlockStored", [4, 5], None, [4, 5]],
    ]


# -- with an engine ----------------------------------------------------------------------------------------------------


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def publisher(stack):
    return stack.enter_context(closing(KVPublisher(LOCAL, replay=LOCAL)))


@pytest.fixture
def router(stack, publisher):
    return stack.enter_context(closing(Router(publisher.endpoint, publisher.replay)))


@pytest.fixture
def config(tmp_path):
    return EngineConfig(RunnerConfig(tmp_path), kv_events=True, log_level="critical")


class Watched:
    """An engine in a thread, of which the test sees the inside."""

    def __init__(self, config, publisher):
        self.engines = []
        self._config = config
        self.client = InProcessEngine(self._load, LIMITS, publisher.publish)

    def _load(self):
        loaded = cached_engine.load(self._config)
        self.engines.append(loaded.engine)
        return loaded

    @property
    def truth(self):
        """Hashes of what a plain prompt finds, from the cache and the KV itself."""
        cache, kv = self.engines[-1].scheduler._sharing._cache, self.engines[-1].runner.kv
        return {block_hash(name) for name, block in cache._block_of.items() if kv[block][-1][0] == ""}


@asynccontextmanager
async def running(client) -> AsyncIterator[None]:
    await client.start()
    try:
        await client.wait_ready()
        yield
    finally:
        await client.stop()


def request(identity, prompt, salt="", **fields) -> EngineRequest:
    values = {"max_tokens": 8, "sampling": SamplingParams(seed=1), **fields}
    return EngineRequest(f"{salt}:{identity}", tuple(prompt), cache_salt=salt, **values)


async def answer(client, wanted: EngineRequest) -> list[RequestOutput]:
    return [output async for output in outputs_of(client, wanted)]


async def in_step(router, publisher):
    """A router that came too late for the first batches asks for them."""
    if not router.numbers:
        router.ask(0)
    await router_in_step(router, publisher)


def random_request(pick, identity, prefixes) -> EngineRequest:
    """With few different tokens, so that prompts meet."""
    prompt = pick.choice(prefixes) + [pick.randrange(4) for _ in range(pick.randint(1, 20))]
    choices = tuple(ChoiceState(index) for index in range(pick.choice([1, 1, 3])))
    sampling = SamplingParams(seed=pick.randrange(9))
    salt = pick.choice(["", "", "red"])
    return request(identity, prompt, salt, max_tokens=20, choices=choices, sampling=sampling)


async def test_a_router_knows_the_cache_at_every_quiet_moment(publisher, router, config):
    """Through evictions, preemptions, errors, salts, and the engine's end."""
    pick = random.Random(5)
    watched = Watched(config, publisher)
    prefixes = [[pick.randrange(4) for _ in range(12)] for _ in range(3)]
    num_preempted = num_removed = 0
    async with running(watched.client):
        for turn in range(30):
            if turn == 15:
                with pytest.raises(RequestFailedError):
                    await answer(watched.client, request("crash", [CRASH]))
            before = set(router.index.held)
            crowd = [random_request(pick, f"{turn}/{index}", prefixes) for index in range(pick.randint(2, 6))]
            await asyncio.gather(*(answer(watched.client, one) for one in crowd))
            await in_step(router, publisher)
            assert router.index.held == watched.truth
            num_removed += len(before - router.index.held)
            num_preempted = max(num_preempted, watched.client.stats.preemptions)
    assert len(watched.engines) > 2
    assert router.index.num_cleared == 2  # engines that die before their first block have nothing to tell
    assert num_preempted > 0
    assert num_removed > NUM_BLOCKS


async def test_a_router_that_hashes_by_itself_finds_as_much_of_a_prompt_as_the_server(publisher, router, config):
    pick = random.Random(6)
    watched = Watched(config, publisher)
    system, question = [pick.randrange(40) for _ in range(19)], [pick.randrange(40) for _ in range(9)]
    async with running(watched.client):
        await answer(watched.client, request("first", [*system, 1, 2, 3], max_tokens=0))
        await in_step(router, publisher)
        assert router.index.num_found(system + question, BLOCK_SIZE) == 4
        assert router.index.num_found(question + system, BLOCK_SIZE) == 0
        output, *_ = await answer(watched.client, request("second", system + question, max_tokens=0))
        assert output.num_cached_tokens == 4 * BLOCK_SIZE
        await in_step(router, publisher)
        assert router.index.num_found(system + question, BLOCK_SIZE) == 7
        output, *_ = await answer(watched.client, request("salted", system + question, salt="red", max_tokens=0))
        assert output.num_cached_tokens == 0
        for index in range(2 * NUM_BLOCKS):
            await answer(watched.client, request(index, [pick.randrange(40) for _ in range(30)]))
        await in_step(router, publisher)
        assert router.index.num_found(system + question, BLOCK_SIZE) == 0


async def test_an_engine_that_is_killed_is_forgotten_and_the_next_one_goes_on(publisher, router, config):
    factory = "tests.engine_process.cached_engine"
    client = EngineProcess(config, LIMITS, publisher.publish, partial(ProcessLink.open, factory))
    prompts = [[token] * 9 for token in range(3)]
    async with running(client):
        for index, prompt in enumerate(prompts[:2]):
            await answer(client, request(index, prompt, max_tokens=1))
        await in_step(router, publisher)
        known = dict(router.index.key_of)
        assert len(known) == 4
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.num_restarts == 1)
        for index, prompt in enumerate(prompts[1:]):
            await answer(client, request(index, prompt, max_tokens=1))
        await in_step(router, publisher)
    assert router.index.num_cleared == 2
    assert router.numbers == sorted(router.numbers)
    assert [router.index.num_found(prompt, BLOCK_SIZE) for prompt in prompts] == [0, 2, 2]
    common = known.keys() & router.index.key_of.keys()
    assert {known[block] for block in common} == {router.index.key_of[block] for block in common}
    assert len(common) == 2  # a hash means the same in every process


async def test_nothing_is_told_where_nobody_wants_to_know(publisher, config):
    watched = Watched(replace(config, kv_events=False), publisher)
    async with running(watched.client):
        await answer(watched.client, request("a", range(9)))
    assert publisher._num_batches == 0


def test_without_it_pyzmq_is_not_imported():
    modules = "server.cli.lifecycle, server.app, server.engine.worker, server.engine.building"
    script = f"import sys, {modules}; sys.exit('zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
