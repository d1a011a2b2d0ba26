"""Replicas that come with load and go without it, and finish what they have before they do."""

import asyncio
import itertools
import time

import httpx
import pytest

from tests.ray.cluster import Cluster, wait_for
from tests.ray.test_replicas import CHAT, read, story, told

pytestmark = [pytest.mark.ray, pytest.mark.embedded]


def replicas_told(address: str) -> int:
    """Replicas that have metrics."""
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    return len({line for line in lines if line.startswith("samewise:num_requests_running{")})


async def sessions_of_both(client: httpx.AsyncClient, address: str) -> list[int]:
    """For each replica, the number of a story that is routed there."""
    homes: dict[str, int] = {}
    for number in itertools.count(100):
        answer = await client.post(address + CHAT, json={**story(number, 1), "stream": False})
        homes.setdefault(answer.headers["x-samewise-replica"], number)
        if len(homes) == 2:
            break
    return list(homes.values())


async def test_a_second_replica_comes_with_load_and_goes_after_its_last_stream(ray: Cluster) -> None:
    options = {"max_replicas": 2, "upscale_delay_s": 0, "downscale_delay_s": 0, "max_num_seqs": 8, "kv_cache_gib": 0.5}
    address = ray.address
    with ray.running(drain_grace_s=120, **options):
        started = time.monotonic()
        async with httpx.AsyncClient(timeout=120) as client:
            load = [asyncio.create_task(read(client, address, story(n, 7000), asyncio.Event())) for n in range(10)]
            await asyncio.to_thread(wait_for, lambda: replicas_told(address) == 2)
            told.info("two replicas %.0f s after the load began", time.monotonic() - started)
            for stream in load:
                stream.cancel()
            quiet = time.monotonic()
            ended: list[tuple[str, str]] = []
            is_draining = asyncio.Event()

            async def tell(number: int) -> None:
                while not is_draining.is_set():
                    ended.append(await read(client, address, story(number, 400), asyncio.Event()))

            tellers = [asyncio.create_task(tell(n)) for n in await sessions_of_both(client, address)]
            await asyncio.to_thread(wait_for, lambda: replicas_told(address) == 1)
            assert len(ray.replica_pids()) == 2
            is_draining.set()
            await asyncio.gather(*tellers)
            told.info("new requests went to one %.0f s after the load ended", time.monotonic() - quiet)
            assert len({replica for replica, _ in ended}) == 2
            assert all('"finish_reason":"length"' in text for _, text in ended)
            await asyncio.to_thread(wait_for, lambda: len(ray.replica_pids()) == 1)
            told.info("the other one had ended %.0f s after the load", time.monotonic() - quiet)
            assert (await client.post(address + CHAT, json={**story(1, 2), "stream": False})).status_code == 200
