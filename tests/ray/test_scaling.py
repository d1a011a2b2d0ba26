"""Replicas that come with load and go without it, and finish what they have before they do."""

import asyncio
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


async def test_a_second_replica_comes_with_load_and_goes_after_its_last_stream(ray: Cluster) -> None:
    options = {"max_replicas": 2, "upscale_delay_s": 0, "downscale_delay_s": 0, "max_num_seqs": 8, "kv_cache_gib": 0.5}
    address = ray.address
    with ray.running(drain_grace_s=300, **options):
        started = time.monotonic()
        async with httpx.AsyncClient(timeout=300) as client:
            load = [asyncio.create_task(read(client, address, story(n, 6000), asyncio.Event())) for n in range(10)]
            await asyncio.to_thread(wait_for, lambda: replicas_told(address) == 2)
            told.info("two replicas %.0f s after the load began", time.monotonic() - started)
            begun = [asyncio.Event(), asyncio.Event()]  # the first replica is full, so these are the other one's
            late = [asyncio.create_task(read(client, address, story(20, 5000), one)) for one in begun]
            await asyncio.gather(*(one.wait() for one in begun))
            rest = [*load[:2], *late]
            for stream in load[2:]:
                stream.cancel()
            quiet = time.monotonic()
            await asyncio.to_thread(wait_for, lambda: replicas_told(address) == 1)
            told.info("one replica gets new requests %.0f s after the load ended", time.monotonic() - quiet)
            assert len(ray.replica_pids()) == 2
            assert not any(stream.done() for stream in rest)
            ended = await asyncio.gather(*rest)
            assert len({replica for replica, _ in ended}) == 2
            assert all('"finish_reason":"length"' in text for _, text in ended)
            await asyncio.to_thread(wait_for, lambda: len(ray.replica_pids()) == 1)
            told.info("the other one has ended %.0f s after the load", time.monotonic() - quiet)
            assert (await client.post(address + CHAT, json={**story(1, 2), "stream": False})).status_code == 200
