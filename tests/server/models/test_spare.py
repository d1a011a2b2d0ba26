"""The process that waits: it is given away, replaced, plans models, and survives what processes do not."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

import pytest

from server.engine.messages import FromEngine, Plan
from server.engine.process import EngineProcess, ProcessLink
from server.models.ledger import Ledgers
from server.models.source import ProcessSource
from server.models.spare import PlanError, PlanLimits, SpareWorker
from tests.engine_process.conftest import LIMITS, QUICK, collect, request
from tests.engine_process.fake_engine import WARM_BYTES, expected
from tests.engine_process.test_process import is_reaped
from tests.server.models.conftest import OPEN
from tests.waiting import until

PlanOf = Callable[..., Plan]


def kill(pid: int) -> None:
    """Kill a child, and return once it is dead."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # a thread of asyncio was faster
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def test_a_process_waits_and_an_engine_is_loaded_into_it(spare: SpareWorker, plan_of: PlanOf) -> None:
    spare.refill()
    await until(lambda: spare.num_bytes == WARM_BYTES)
    waiting = spare.pid
    assert spare.is_warm
    client = EngineProcess(plan_of("model").config, LIMITS, open_link=spare.take)
    await client.start()
    await client.wait_ready()
    assert client.pid == waiting
    assert spare.pid is None
    assert not spare.is_warm
    os.kill(waiting, signal.SIGKILL)
    assert await collect(client, request("a")) == {0: expected(request("a"))}  # by a process that is started now
    assert client.num_restarts == 1
    await client.stop()
    spare.refill()
    await until(lambda: spare.pid not in (None, waiting))


async def test_a_spare_that_dies_is_replaced_and_never_given_away(spare: SpareWorker) -> None:
    spare.refill()
    await until(lambda: spare.num_bytes is not None)
    first = spare.pid
    kill(first)
    link = await spare.take()  # before anything in this process has heard of the death
    assert link.pid != first
    await link.close(0.0)
    spare.refill()
    await until(lambda: spare.pid is not None)
    second = spare.pid
    os.kill(second, signal.SIGKILL)
    await until(lambda: spare.pid not in (None, second))


async def test_a_spare_that_always_dies_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    starts = []

    async def start() -> ProcessLink:
        starts.append(1)
        raise OSError("no more processes")

    spare = SpareWorker(start, QUICK)
    spare.refill()
    await until(lambda: "No spare engine process waits any more" in caplog.text)
    assert len(starts) == QUICK.max_failures
    with pytest.raises(OSError, match="no more processes"):
        await spare.take()
    await spare.close()


class _Dying(ProcessLink):
    """A link to a process that ends when the test says so."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()

    @property
    def is_alive(self) -> bool:
        return not self.ends.is_set()

    async def receive(self) -> FromEngine:
        await asyncio.Event().wait()
        raise AssertionError

    async def exited(self) -> str:
        await self.ends.wait()
        return "killed"

    async def close(self, grace_s: float) -> None:
        self.ends.set()


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("event", ["death", "refill"])
async def test_what_happens_while_a_process_is_taken_loses_none(event: str, turns: int) -> None:
    links: list[_Dying] = []

    async def start() -> ProcessLink:
        links.append(_Dying())
        return links[-1]

    spare = SpareWorker(start, QUICK)
    spare.refill()
    await until(lambda: bool(links))
    if event == "death":
        links[0].ends.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        link = await spare.take()
    else:
        taking = asyncio.create_task(spare.take())
        for _ in range(turns):
            await asyncio.sleep(0)
        spare.refill()
        link = await taking
    assert link.is_alive
    await spare.close()
    assert [one for one in links if one.is_alive] == [link]


async def test_the_event_loop_starts_one_process_at_a_time() -> None:
    """The system copies the server's memory tables for each, and requests are answered in between."""
    num_starting: list[int] = []
    starting: set[int] = set()

    async def start() -> ProcessLink:
        starting.add(number := len(num_starting))
        num_starting.append(len(starting))
        await asyncio.sleep(0)
        starting.remove(number)
        return _Dying()

    spare = SpareWorker(start, QUICK)
    await asyncio.gather(*(spare.take() for _ in range(5)))
    assert num_starting == [1] * 5


async def test_plans_are_answered_one_after_the_other_by_one_process(spare: SpareWorker, plan_of: PlanOf) -> None:
    first, second = await asyncio.gather(spare.plan(plan_of("a", 10)), spare.plan(plan_of("b", 20)))
    assert (first.cache_bytes, second.cache_bytes) == (10, 20)
    assert first.process_bytes == second.process_bytes == spare.pid
    link = await spare.take()
    assert link.pid == first.process_bytes  # and it can still load
    await link.close(0.0)


async def test_models_that_cannot_be_served_are_named(spare: SpareWorker, plan_of: PlanOf) -> None:
    answers = {
        "refused": "^the model needs 80 GiB, 16 GiB are free$",
        "crashing": "RuntimeError",
        "killed": "was killed by SIGKILL",
    }
    for name, reason in answers.items():
        with pytest.raises(PlanError, match=reason):
            await spare.plan(plan_of(name, 10))
    good = ProcessSource(plan_of("good").config, LIMITS, spare, Ledgers(10), None)
    assert await good.plan() == good.needs.reserved_bytes
    assert good.needs.cache_bytes == 10


async def test_a_plan_waits_for_none_that_stands(plan_of: PlanOf) -> None:
    spare = SpareWorker(OPEN, QUICK, PlanLimits(turn_s=0.01))
    standing = asyncio.create_task(spare.plan(plan_of("slow")))
    assert (await spare.plan(plan_of("good", 10))).cache_bytes == 10
    assert not standing.done()
    standing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await standing
    await spare.close()


@pytest.mark.parametrize(
    ("limits", "name", "reason"),
    [
        (PlanLimits(longest_s=0.0), "slow", "^planning it takes more than 0 s$"),
        (PlanLimits(most_bytes=150 << 20, check_s=0.001), "growing", "^planning it takes more than 150 MiB of memory$"),
    ],
)
async def test_a_plan_that_exceeds_a_limit_ends(limits: PlanLimits, name: str, reason: str, plan_of: PlanOf) -> None:
    spare = SpareWorker(OPEN, QUICK, limits)
    with pytest.raises(PlanError, match=reason):
        await spare.plan(plan_of(name))
    assert spare.pid is None
    await spare.close()


async def test_a_process_that_plans_ends_when_nobody_waits_for_it(spare: SpareWorker, plan_of: PlanOf) -> None:
    spare.refill()
    await until(lambda: spare.num_bytes is not None)
    planning = spare.pid
    task = asyncio.create_task(spare.plan(plan_of("slow")))
    await until(lambda: spare.pid is None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_reaped(planning)


async def test_a_closed_spare_leaves_no_process(spare: SpareWorker) -> None:
    spare.refill()
    await until(lambda: spare.pid is not None)
    pid = spare.pid
    await spare.close()
    spare.refill()
    assert spare.pid is None
    assert is_reaped(pid)
