"""Which models are loaded, and how long requests wait for them."""

import asyncio
import random
from collections.abc import Callable
from functools import partial
from itertools import groupby

import pytest

from server.engine.client import EngineState, EngineUnavailableError
from server.errors import RateLimitError, UnavailableError
from server.models import host as hosting
from server.models.hosted_model import HostedModel, Phase, Residency
from tests.server.models.worlds import FakeSource, NoSpare, hold_up, host_of, in_virtual_time, request

_THREE = ("a", "b", "c")


def test_requests_wait_for_one_load() -> None:
    async def world() -> None:
        source = FakeSource(10)
        host, models = host_of(10, {"a": source})
        await host.start()
        waits = await asyncio.gather(*(request(models["a"], 1.0) for _ in range(8)))
        assert waits == [1.0] * 8
        assert len(source.engines) == 1
        assert await request(models["a"], 1.0) == 0.0
        await host.stop()

    in_virtual_time(world())


def test_the_least_recently_used_makes_room() -> None:
    async def world() -> None:
        host, models = host_of(20, {name: FakeSource(10) for name in _THREE})
        await host.start()
        for name in ("a", "b", "a"):
            await request(models[name], 5.0)
        await request(models["c"], 1.0)
        assert [models[name].phase for name in _THREE] == [Phase.LOADED, Phase.UNLOADED, Phase.LOADED]
        await host.stop()

    in_virtual_time(world())


def test_no_more_go_than_needed() -> None:
    async def world() -> None:
        sizes = {"small": 2, "big": 8, "new": 7}
        host, models = host_of(10, {name: FakeSource(size) for name, size in sizes.items()})
        await host.start()
        for name in ("small", "big"):
            await request(models[name], 5.0)
        await request(models["new"], 1.0)
        assert models["small"].phase is Phase.LOADED, "big alone makes room"
        await host.stop()

    in_virtual_time(world())


def test_a_plan_that_stands_keeps_no_other_model_waiting() -> None:
    async def world() -> None:
        sources = {"standing": FakeSource(1, plan_s=1e6), "good": FakeSource(1), "other": FakeSource(1)}
        host, models = host_of(10, sources, lambda name: Residency(is_loaded_at_start=name != "other"))
        await host.start()
        await models["good"].became_loaded.wait()
        await request(models["other"], 1.0)
        assert asyncio.get_running_loop().time() < 20
        await host.stop()

    in_virtual_time(world())


def test_a_pinned_model_stays() -> None:
    async def world() -> None:
        host, models = host_of(
            10,
            {name: FakeSource(10) for name in "ab"},
            lambda name: Residency(is_pinned=name == "a", load_timeout_s=50),
        )
        await host.start()
        await request(models["a"], 1.0)
        with pytest.raises(UnavailableError, match="not loaded in time") as refused:
            await request(models["b"], 1.0)
        assert refused.value.code == "model_loading"
        assert models["a"].phase is Phase.LOADED
        await host.stop()

    in_virtual_time(world())


def test_a_busy_model_yields_and_nobody_is_cut() -> None:
    """One model always has a request, so that it would never be idle."""

    async def world() -> None:
        host, models = host_of(10, {name: FakeSource(10, load_s=2.0) for name in "ab"})
        await host.start()
        for_a: list[float] = []

        async def keep_busy() -> None:
            for_a.extend([await request(models["a"], 3.0) for _ in range(40)])

        busy = [asyncio.create_task(keep_busy()) for _ in range(3)]
        await asyncio.sleep(20)
        waited = await request(models["b"], 1.0)
        assert hosting.YIELD_AFTER_S < waited < hosting.YIELD_AFTER_S + 3.0 + 2.0 + 0.1
        await asyncio.gather(*busy)
        assert max(for_a) < 20
        await host.stop()

    in_virtual_time(world())


def test_a_model_stays_for_a_while_after_its_load() -> None:
    async def world() -> None:
        host, models = host_of(10, {name: FakeSource(10, load_s=4.0) for name in "ab"})
        await host.start()
        await request(models["a"], 0.1)
        waited = await request(models["b"], 0.1)
        assert waited == pytest.approx(3 * 4.0 - 0.1 + 4.0, abs=0.2)  # its residence, and the load
        await host.stop()

    in_virtual_time(world())


def test_an_unused_model_goes() -> None:
    async def world() -> None:
        host, models = host_of(10, {"a": FakeSource(10)}, lambda _: Residency(idle_s=60))
        await host.start()
        await request(models["a"], 1.0)
        await asyncio.sleep(59)
        assert models["a"].phase is Phase.LOADED
        await asyncio.sleep(2)
        assert models["a"].phase is Phase.UNLOADED
        assert models["a"].num_loads == 1
        assert models["a"].info is not None, "what is known of it stays known"
        await host.stop()

    in_virtual_time(world())


def test_background_requests_take_free_memory_alone() -> None:
    async def world() -> None:
        host, models = host_of(20, {name: FakeSource(10) for name in _THREE})
        await host.start()
        await request(models["a"], 1.0)
        await request(models["b"], 0.1, is_background=True)
        line = asyncio.create_task(request(models["c"], 0.1, is_background=True))
        await asyncio.sleep(10_000)
        assert not line.done()
        await host.unload(models["a"], grace_s=None)
        await line
        assert models["b"].phase is Phase.LOADED
        await host.stop()

    in_virtual_time(world())


def test_a_failed_load_is_told_and_tried_again() -> None:
    async def world() -> None:
        source = FakeSource(10, failures=["The file is cut off."])
        host, models = host_of(10, {"a": source})
        await host.start()
        for _ in range(2):  # the second one is refused at once
            with pytest.raises(UnavailableError, match="log says why") as refused:
                await request(models["a"], 1.0)
            assert refused.value.code == "model_unavailable"
        assert len(source.engines) == 1
        await asyncio.sleep(5)
        await request(models["a"], 1.0)
        await host.stop()

    in_virtual_time(world())


def test_a_model_that_cannot_fit_says_so() -> None:
    async def world() -> None:
        host, models = host_of(1 << 30, {"a": FakeSource(3 << 30), "b": FakeSource(1, refusal="No such layer.")})
        await host.start()
        for name, reason in (("a", r"needs 3\.00 GiB, .* take 1\.00 GiB"), ("b", "log says why")):
            with pytest.raises(UnavailableError, match=reason):
                await request(models[name], 1.0)
        await host.stop()

    in_virtual_time(world())


def test_a_crash_for_good_frees_the_memory() -> None:
    async def world() -> None:
        sources = {name: FakeSource(10) for name in "ab"}
        host, models = host_of(10, sources)
        await host.start()
        await request(models["a"], 1.0)
        sources["a"].engines[0].crash()
        await request(models["b"], 1.0)
        with pytest.raises(UnavailableError, match="its engine failed"):
            await request(models["a"], 1.0)
        await host.stop()

    in_virtual_time(world())


def test_a_model_of_the_start_that_crashed_is_loaded_again_without_a_request() -> None:
    async def world() -> None:
        sources = {name: FakeSource(10) for name in "ab"}
        host, models = host_of(20, sources, lambda name: Residency(is_loaded_at_start=name == "a"))
        await host.start()
        await host.wait_ready()
        await request(models["b"], 1.0)
        for name in "ab":
            sources[name].engines[0].crash()
        await asyncio.sleep(1)
        assert not models["a"].is_ready
        await asyncio.sleep(10)
        assert models["a"].is_ready
        assert [len(sources[name].engines) for name in "ab"] == [2, 1]
        await host.stop()

    in_virtual_time(world())


def test_an_operator_unloads_when_requests_have_ended_or_at_once() -> None:
    async def world() -> None:
        source = FakeSource(10)
        host, models = host_of(10, {"a": source})
        await host.start()
        running = asyncio.create_task(request(models["a"], 30.0))
        await asyncio.sleep(2)
        await host.unload(models["a"], grace_s=None)
        assert running.done()
        await running
        cut = asyncio.create_task(request(models["a"], 30.0))
        await asyncio.sleep(2)
        await host.unload(models["a"], grace_s=5.0)
        assert asyncio.get_running_loop().time() < 50
        assert "operator" in (source.engines[-1].stopped_for or "")
        with pytest.raises(AssertionError, match="a request was cut"):
            await cut
        await host.load(models["a"])
        assert models["a"].is_open
        await host.stop()

    in_virtual_time(world())


def test_a_model_is_unloaded_though_the_operator_has_left() -> None:
    async def world() -> None:
        host, models = host_of(10, {name: FakeSource(10, stop_s=5.0) for name in "ab"})
        await host.start()
        await request(models["a"], 1.0)
        left = asyncio.create_task(host.unload(models["a"], grace_s=None))
        await asyncio.sleep(1)
        left.cancel()
        await host.unload(models["a"], grace_s=None)
        assert models["a"].phase is Phase.UNLOADED, "the second operator is told when the memory is free"
        assert await request(models["b"], 1.0) == 1.0
        await host.stop()

    in_virtual_time(world())


def test_operators_unload_and_load_at_once() -> None:
    async def world() -> None:
        host, models = host_of(10, {"a": FakeSource(10, stop_s=5.0)})
        await host.start()
        running = asyncio.create_task(request(models["a"], 30.0))
        await asyncio.sleep(2)
        stays, leaves = [asyncio.create_task(host.unload(models["a"], grace_s=None)) for _ in range(2)]
        await asyncio.sleep(1)
        leaves.cancel()
        await running
        assert not stays.done(), "the process is still there"
        await host.load(models["a"])
        assert stays.done()
        assert models["a"].is_open
        assert models["a"].num_loads == 2
        await host.stop()

    in_virtual_time(world())


def test_an_unload_as_the_load_begins_leaves_no_engine() -> None:
    async def world() -> None:
        source = FakeSource(10)
        host, models = host_of(10, {"a": source})
        await host.start()
        loading = asyncio.create_task(host.load(models["a"]))
        end = host.watch(lambda: unloads.append(asyncio.ensure_future(host.unload(models["a"], grace_s=None)))
                         if models["a"].phase is Phase.LOADING and not unloads else None)  # fmt: skip
        unloads: list[asyncio.Future[None]] = []
        with pytest.raises(EngineUnavailableError, match="an operator unloaded it"):
            await loading
        end()
        await unloads[0]
        await asyncio.sleep(10)
        assert all(engine.stopped_for is not None for engine in source.engines)
        await host.stop()

    in_virtual_time(world())


def test_a_model_that_is_loaded_as_the_time_ends_is_used() -> None:
    async def world() -> None:
        host, models = host_of(10, {"a": FakeSource(10)}, lambda _: Residency(load_timeout_s=2.0))
        await host.start()
        end = host.watch(lambda: hold_up(5.0) if models["a"].waiters and models["a"].phase is Phase.LOADED else None)
        assert await request(models["a"], 1.0) == 6.0
        end()
        assert models["a"].num_uses == 0
        await host.stop()

    in_virtual_time(world())


def test_an_end_of_the_server_ends_loads() -> None:
    async def world() -> None:
        host, models = host_of(10, {"a": FakeSource(10, load_s=100.0)})
        await host.start()
        loading = asyncio.create_task(host.load(models["a"]))
        waiting = asyncio.create_task(request(models["a"], 1.0))
        await asyncio.sleep(1)
        await host.drain(30.0)
        for task in (loading, waiting, asyncio.create_task(host.load(models["a"]))):
            with pytest.raises((EngineUnavailableError, UnavailableError), match="shutting down"):
                await task
        assert asyncio.get_running_loop().time() < 2

    in_virtual_time(world())


def test_a_process_waits_again_after_a_load_that_failed() -> None:
    async def world() -> None:
        host, models = host_of(10, {"a": FakeSource(10, failures=["no"])})
        await host.start()
        with pytest.raises(EngineUnavailableError, match="no"):
            await host.load(models["a"])
        assert isinstance(host._spare, NoSpare)
        assert host._spare.num_refills == 1
        await host.stop()

    in_virtual_time(world())


def test_who_leaves_leaves_and_the_memory_serves_others() -> None:
    async def world() -> None:
        host, models = host_of(10, {name: FakeSource(10, load_s=100.0) for name in "ab"})
        await host.start()
        left = asyncio.create_task(request(models["a"], 1.0))
        await asyncio.sleep(1)
        left.cancel()
        assert await request(models["b"], 1.0) < 102, "the load that nobody waits for any more is ended"
        assert models["a"].num_uses == 0
        await host.stop()

    in_virtual_time(world())


def test_too_many_waiters_and_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def world() -> None:
        host, models = host_of(10, {"a": FakeSource(10)}, lambda _: Residency(max_waiting=2))
        await host.start()
        waiting = [asyncio.create_task(request(models["a"], 0.1)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(RateLimitError, match="2 requests wait"):
            await request(models["a"], 0.1)
        await asyncio.gather(*waiting)
        await host.unload(models["a"], grace_s=None)
        monkeypatch.setattr(hosting, "MAX_WAITING_BYTES", 99)
        with pytest.raises(RateLimitError):
            await request(models["a"], 0.1)
        await host.stop()

    in_virtual_time(world())


def test_a_failure_at_the_start_is_the_servers() -> None:
    async def world() -> None:
        host, _ = host_of(10, {"a": FakeSource(10, failures=["no"])}, lambda _: Residency(is_loaded_at_start=True))
        assert host.state is EngineState.STARTING
        await host.start()
        with pytest.raises(EngineUnavailableError, match="a: no"):
            await host.wait_ready()
        assert host.state is EngineState.FAILED
        await host.stop()

    in_virtual_time(world())


def _clients(
    models: dict[str, HostedModel], seed: int, num_clients: int, num_requests: int
) -> tuple[list[Callable[[], "asyncio.Task[None]"]], list[tuple[str, float]]]:
    """Clients that ask for the models in random turns, and the waits that they had."""
    chance, waits = random.Random(seed), []

    async def client(names: list[str]) -> None:
        waits.extend([(name, await request(models[name], 0.5)) for name in names])

    turns = [[chance.choice(list(models)) for _ in range(num_requests)] for _ in range(num_clients)]
    return [partial(asyncio.create_task, client(names)) for names in turns], waits


@pytest.mark.parametrize("seed", range(5))
def test_crowds_on_too_many_models_neither_starve_nor_thrash(seed: int) -> None:
    """Two of three models fit, and 16 clients ask for all of them in random turns."""

    async def world() -> None:
        sources = {name: FakeSource(10, load_s=2.0) for name in _THREE}
        host, models = host_of(20, sources)
        await host.start()
        clients, waits = _clients(models, seed, num_clients=16, num_requests=20)
        await asyncio.gather(*(begin() for begin in clients))
        assert len(waits) == 16 * 20
        duration = asyncio.get_running_loop().time()
        num_loads = sum(len(source.engines) for source in sources.values())
        # A load takes 2 s, and a model then stays for 6 s or goes for somebody who has waited for so long.
        assert num_loads <= 2 * (1 + duration / 8)
        assert max(wait for _, wait in waits) < 6 + hosting.YIELD_AFTER_S + 0.5 + 2 * 2.0 + 6
        await host.stop()

    in_virtual_time(world())


def test_a_queue_of_requests_is_served_before_the_next_switch() -> None:
    """The requests for one model that have waited go together."""

    async def world() -> None:
        order: list[str] = []
        host, models = host_of(10, {name: FakeSource(10, load_s=1.0) for name in "ab"})
        await host.start()

        async def ask(name: str) -> None:
            await request(models[name], 0.2)
            order.append(name)

        await asyncio.gather(*(ask(name) for name in "abababababab"))
        assert [name for name, _ in groupby(order)] == ["a", "b"]
        await host.stop()

    in_virtual_time(world())
