"""Sends damaged images to a running server: each must be answered or refused, and the server must stay well.

    python -m bench.image_fuzz --url http://127.0.0.1:8000 --count 5000 --pid PID

The files are PNG, JPEG, WebP and GIF with changed, removed and repeated bytes. Prints the statuses, the server's memory
before and after (with its process id), and the slowest answers of GET /health before and meanwhile. Fails on another
status than 200 and 400, and if an error's text has more than our own words.
"""

import argparse
import asyncio
import base64
import io
import random
import re
import threading
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
_IDLE_S = 3.0
"""How long /health is watched before."""


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


class Watch:
    """Asks for /health again and again in a thread, so that the answers' times have none of the senders' work."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seconds: list[float] = []
        """How long each answer took."""

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(timeout=120) as client:
            while not self._is_done.wait(0.02):
                begun = time.perf_counter()
                client.get(f"{self._url}/health").raise_for_status()
                self.seconds.append(time.perf_counter() - begun)

    def __str__(self) -> str:
        ordered = sorted(self.seconds)
        return (
            f"slowest {1000 * ordered[-1]:.0f} ms, 99 of 100 within {1000 * ordered[int(0.99 * len(ordered))]:.0f} ms"
        )


async def fuzz(url: str, count: int, seed: int) -> Counter[str]:
    """How often each status and code came."""
    draw = random.Random(seed)
    files = originals(draw)
    outcomes: Counter[str] = Counter()
    queue = iter(range(count))

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

    async with httpx.AsyncClient(timeout=120) as client:
        await asyncio.gather(*(send(client) for _ in range(_AT_ONCE)))
    return outcomes


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
    try:
        httpx.get(f"{asked.url}/health").raise_for_status()
    except httpx.HTTPError as error:
        raise SystemExit(f"No server answers at {asked.url} ({error}). Serve a model that takes images.") from None
    before = memory_of(asked.pid)
    with Watch(asked.url) as idle:
        time.sleep(_IDLE_S)
    with Watch(asked.url) as meanwhile:
        outcomes = asyncio.run(fuzz(asked.url, asked.count, asked.seed))
    console = Console()
    for outcome, count in outcomes.most_common():
        console.print(f"{count:6}  {outcome}")
    console.print(f"memory before {before}, after {memory_of(asked.pid)}")
    console.print(f"/health before: {idle}; meanwhile: {meanwhile}")
    if wrong := {outcome for outcome in outcomes if outcome[:3] not in ("200", "400")}:
        raise SystemExit(f"Other statuses than 200 and 400: {wrong}")


if __name__ == "__main__":
    main()
