"""Sends damaged images to a running server: each must be answered or refused, and the server must stay well.

    python -m bench.image_fuzz --url http://127.0.0.1:8000 --count 5000 --pid PID

The files are PNG, JPEG, WebP and GIF with changed, removed and repeated bytes. Prints the statuses, the server's memory
before and after (with its process id), and the slowest answer of GET /health meanwhile. Fails on another status than
200 and 400, and if an error's text has more than our own words.
"""

import argparse
import asyncio
import base64
import io
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from rich.console import Console

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_FOREIGN = re.compile(r"0x[0-9a-f]{6}|object at|PIL|Traceback|/site-packages/")
_AT_ONCE = 4


def originals(draw: random.Random) -> list[bytes]:
    """Files of each format and of several sizes."""
    files = []
    for form in FORMATS:
        for width, height in ((1, 1), (40, 30), (200, 90)):
            pixels = np.random.default_rng(draw.randrange(1 << 30)).integers(0, 256, (height, width, 3), np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, form)
            files.append(file.getvalue())
    return files


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The file with some bytes changed, removed or repeated."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 12)):
        at = draw.randrange(len(changed))
        match draw.randrange(4):
            case 0:
                changed[at] = draw.randrange(256)
            case 1:
                del changed[at : at + draw.randint(1, 16)]
            case 2:
                changed[at:at] = changed[at : at + draw.randint(1, 64)]
            case _:
                changed[at : at + 4] = draw.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"))
        if not changed:
            return b"\0"
    return bytes(changed)


async def fuzz(url: str, count: int, seed: int) -> tuple[Counter[str], float]:
    """How often each status and code came, and the slowest answer of /health in seconds."""
    draw = random.Random(seed)
    files = originals(draw)
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    queue = iter(range(count))
    is_done = asyncio.Event()

    async def send(client: httpx.AsyncClient) -> None:
        for _ in queue:
            part = {"url": f"data:image/png;base64,{base64.b64encode(mutated(draw.choice(files), draw)).decode()}"}
            content: list[dict[str, Any]] = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": part}]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}
            response = await client.post(f"{url}/v1/chat/completions", json=body)
            error = {} if response.status_code == 200 else response.json()["error"]
            if found := _FOREIGN.search(str(error.get("message", ""))):
                raise SystemExit(f"An error has more than our own words: {found[0]!r}")
            outcomes[f"{response.status_code} {error.get('code', '')}".strip()] += 1

    async def watch(client: httpx.AsyncClient) -> None:
        nonlocal slowest
        while not is_done.is_set():
            begun = time.perf_counter()
            (await client.get(f"{url}/health")).raise_for_status()
            slowest = max(slowest, time.perf_counter() - begun)
            await asyncio.sleep(0.02)

    async with httpx.AsyncClient(timeout=120) as client:
        watching = asyncio.create_task(watch(client))
        await asyncio.gather(*(send(client) for _ in range(_AT_ONCE)))
        is_done.set()
        await watching
    return outcomes, slowest


def memory_of(pid: int | None) -> str:
    """Resident memory of a process and its children, in MiB."""
    if pid is None:
        return "unknown"
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    total = 0
    for process in (pid, *children):
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
        total += int(found[1]) if found else 0
    return f"{total >> 10} MiB"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pid", type=int, help="the server's process, to measure its memory")
    asked = parser.parse_args()
    before = memory_of(asked.pid)
    outcomes, slowest = asyncio.run(fuzz(asked.url, asked.count, asked.seed))
    console = Console()
    for outcome, count in outcomes.most_common():
        console.print(f"{count:6}  {outcome}")
    console.print(f"memory before {before}, after {memory_of(asked.pid)}; slowest /health {1000 * slowest:.0f} ms")
    if wrong := {outcome for outcome in outcomes if outcome[:3] not in ("200", "400")}:
        raise SystemExit(f"Other statuses than 200 and 400: {wrong}")


if __name__ == "__main__":
    main()
