"""Failures that only a process can have: it is killed, hangs, or is orphaned."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.interface import EngineRequest, RequestOutput
from server.engine.client import EngineState, EngineUnavailableError, RequestFailedError
from server.engine.process import EngineProcess
from server.engine.supervisor import EngineLimits
from tests.engine_process.conftest import MAX_WAITING, QUICK, collect, request, tokens_of
from tests.engine_process.fake_engine import EXIT, HANG, KILL, expected
from tests.engine_process.outputs import outputs_of
from tests.waiting import until

LONG = 100_000
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """Whatever a test did, nothing stays open."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def is_reaped(pid: int) -> bool:
    """Whether not even a zombie is left of the process."""
    return not Path(f"/proc/{pid}").exists()


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_32_streams_survive_a_kill_and_are_what_they_would_have_been(running):
    wanted = [request(f"r{i}", i, max_tokens=60 + i, n=1 + i % 2, seed=i) for i in range(32)]
    seen: list[RequestOutput] = []

    async def watch(client: EngineProcess, stream: EngineRequest) -> dict[int, tuple[int, ...]]:
        outputs = []
        async for output in outputs_of(client, stream):
            outputs.append(output)
            seen.append(output)
            if len(seen) == 32 * 20:
                os.kill(client.pid, signal.SIGKILL)
        return tokens_of(outputs)

    async with running() as client:
        first = client.pid
        got = await asyncio.gather(*(watch(client, r) for r in wanted))
        assert client.num_restarts == 1
        assert client.pid != first
    assert got == [{c.index: expected(r, c.index) for c in r.choices} for r in wanted]


async def test_an_idle_engine_that_is_killed_comes_back(running):
    async with running() as client:
        first = client.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: client.num_restarts == 1)
        assert await collect(client, request("a")) == {0: expected(request("a"))}
        assert is_reaped(first)


@pytest.mark.parametrize("poison", [EXIT, KILL])
async def test_a_poison_in_a_crowd_fails_alone(running, poison):
    crowd = [request(f"r{i}", i, max_tokens=10, seed=i) for i in range(6)]
    async with running() as client:
        failing = asyncio.create_task(collect(client, request("poison", poison)))
        assert await asyncio.gather(*(collect(client, r) for r in crowd)) == [{0: expected(r)} for r in crowd]
        with pytest.raises(RequestFailedError):
            await failing


async def test_a_hanging_engine_is_killed_and_what_hangs_it_is_failed(running):
    limits = EngineLimits(max_waiting=MAX_WAITING, engine_timeout_s=0.4, backoff=QUICK)
    async with running(limits=limits) as client:
        pids = {client.pid}
        hanging = asyncio.create_task(collect(client, request("hang", HANG)))
        other = request("other", max_tokens=40)
        assert await collect(client, other) == {0: expected(other)}
        with pytest.raises(RequestFailedError):
            await hanging
        pids.add(client.pid)
        assert client.num_restarts >= 2
    assert all(is_reaped(pid) for pid in pids)


async def test_an_engine_that_dies_while_it_loads_fails_the_start(make):
    client = make(loads=("exit",))
    await client.start()
    with pytest.raises(EngineUnavailableError, match=r"did not start: process .* exited with code 3"):
        await client.wait_ready()
    assert client.state is EngineState.FAILED
    await client.stop()


async def test_stop_does_not_wait_for_a_model_that_loads(make):
    client = make(loads=("forever",))
    await client.start()
    await until(lambda: client.pid is not None)
    async with asyncio.timeout(10):
        await client.stop()
    assert is_reaped(client.pid)


async def test_stop_kills_an_engine_that_does_not_listen(running):
    async with running() as client:
        consumer = asyncio.create_task(collect(client, request("hang", HANG)))
        await until(lambda: client.stats.steps == 3)
        pid = client.pid
        async with asyncio.timeout(20):
            await client.stop()
        assert is_reaped(pid)
        with pytest.raises(EngineUnavailableError):
            await consumer


async def test_an_engine_ends_by_itself_while_a_thread_of_it_prepares_something(make):
    """As one that compiles a grammar does, for however long that takes."""
    client = make(loads=("beside",))
    await client.start()
    await client.wait_ready()
    await client.stop()
    assert client._process._process.returncode == 0, "it was killed"


async def test_an_engine_that_cannot_even_be_started_is_a_clear_failure(make, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    client = make()
    await client.start()
    with pytest.raises(EngineUnavailableError, match="nonexistent"):
        await client.wait_ready()
    await client.stop()


async def test_the_signals_of_a_terminal_do_not_reach_the_engine(running):
    wanted = request("a", max_tokens=60)
    async with running() as client:
        stream = outputs_of(client, wanted)
        outputs = [await anext(stream)]
        os.kill(client.pid, signal.SIGINT)
        os.kill(client.pid, signal.SIGTERM)
        outputs += [output async for output in stream]
        assert tokens_of(outputs) == {0: expected(wanted)}
        assert client.num_restarts == 0


@pytest.mark.parametrize("prompt", [(1, 2), (HANG,)])
async def test_the_engine_dies_with_its_parent(tmp_path, prompt):
    """Also one that is stuck in a step."""
    script = f"""
import asyncio
from pathlib import Path
from functools import partial
from server.engine.process import ProcessLink
from tests.engine_process.conftest import EngineConfig, EngineProcess, LIMITS, RunnerConfig, request
from tests.engine_process.outputs import outputs_of

async def main():
    config = EngineConfig(RunnerConfig(Path({str(tmp_path)!r})))
    client = EngineProcess(config, LIMITS, open_link=partial(ProcessLink.open, "tests.engine_process.fake_engine"))
    await client.start()
    await client.wait_ready()
    async for output in outputs_of(client, request("a", *{prompt}, max_tokens={LONG})):
        if client.stats.steps >= 3:  # several steps may have been read at once
            print(client.pid, flush=True)

asyncio.run(main())
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, cwd=REPOSITORY, stdout=subprocess.PIPE, env=environment
    )
    try:
        async with asyncio.timeout(60):
            engine = int(await parent.stdout.readline())
        assert is_alive(engine)
    finally:
        parent.kill()
        await parent.communicate()
    await until(lambda: not is_alive(engine))


async def test_the_worker_notices_between_steps_that_its_parent_is_not_the_expected_one():
    """The fallback if the kernel cannot help, or if the parent died before that was requested."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        descriptor = theirs.fileno()
        command = [sys.executable, "-m", "server.engine.worker", "--socket", str(descriptor), "--parent", "1"]
        worker = await asyncio.create_subprocess_exec(
            *command, "--factory", "server.engine.building", pass_fds=[descriptor]
        )
        async with asyncio.timeout(20):
            assert await worker.wait() == 0


async def test_the_worker_ends_when_its_connection_does():
    ours, theirs = socket.socketpair()
    descriptor = theirs.fileno()
    command = [sys.executable, "-m", "server.engine.worker", "--socket", str(descriptor), "--parent", str(os.getpid())]
    with theirs:
        worker = await asyncio.create_subprocess_exec(
            *command, "--factory", "server.engine.building", pass_fds=[descriptor]
        )
    ours.close()
    async with asyncio.timeout(20):
        assert await worker.wait() == 0
