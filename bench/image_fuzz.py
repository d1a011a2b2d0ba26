"""Sends damaged images to a running server: each must be answered or refused, and the server must stay well.

    python -m bench.image_fuzz --url http://127.0.0.1:8000 --count 5000 --pid PID

The files are PNG, JPEG, WebP and GIF with changed, removed and repeated bytes, among them files that ask for far more
work than their pixels: hundreds of scans, thousands of tiny parts, and metadata that grows when it is read. Prints the
statuses, the server's memory before and after (with its process id), and the slowest answers of GET /health before and
meanwhile. Fails on another status than 200 and 400, and if an error's text has more than our own words.
"""

import argparse
import asyncio
import base64
import io
import random
import re
import struct
import threading
import time
import zlib
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
_HEADER = 33
"""Bytes of a PNG file's signature and header."""
_HOSTILE = 0.05
"""Share of hostile files; half of them are sent as they are."""
_IDLE_S = 3.0
"""How long /health is watched before."""


def originals(draw: random.Random) -> list[bytes]:
    """Files of each format and of several sizes."""
    files = []
    for form in FORMATS:
        for width, height in ((1, 1), (40, 30), (200, 90)):
            pixels = np.random.default_rng(draw.randrange(1 << 30)).integers(0, 256, (height, width, 3), np.uint8)
            files.append(_saved(Image.fromarray(pixels), form))
    return files


def hostile() -> list[bytes]:
    """Files that ask for far more work than their bytes and pixels."""
    large, small = Image.new("RGB", (4000, 4000), (90, 160, 40)), Image.new("RGB", (8, 8))
    progressive, whole, jpeg = _saved(large, "JPEG", progressive=True), _saved(small, "PNG"), _saved(small, "JPEG")
    last, gif = progressive.rindex(b"\xff\xda"), _saved(small, "GIF")
    bomb = zlib.compress(bytes(64 << 20))
    entries = b"".join(struct.pack("<HHII", 0x9000 + tag, 7, 1 << 20, 8) for tag in range(1000))
    exif = b"II*\0\x08\0\0\0" + struct.pack("<H", 1000) + entries + bytes(1 << 20)
    chunks = [_chunk(b"tEXt", b"") * 50_000, _chunk(b"zTXt", b"a\0\0" + bomb), _chunk(b"iCCP", b"a\0\0" + bomb)]
    header = struct.pack(">IIBBBBB", 4000, 4000, 8, 0, 0, 0, 1)  # interlaced, in seven passes
    return [
        progressive[:last] + 900 * progressive[last:-2] + progressive[-2:],
        jpeg[:2] + b"\xff\xed\0\2" * 200_000 + jpeg[2:],
        gif[:-1] + b"!\xfe\1a\0" * 200_000 + gif[-1:],
        *(whole[:_HEADER] + chunk + whole[_HEADER:] for chunk in (*chunks, _chunk(b"eXIf", exif))),
        whole[:8] + _chunk(b"IHDR", header) + _chunk(b"IDAT", bomb) + _chunk(b"IEND", b""),
    ]


def _saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def _chunk(name: bytes, content: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


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
    files, others = originals(draw), hostile()
    outcomes: Counter[str] = Counter()
    queue = iter(range(count))

    async def send(client: httpx.AsyncClient) -> None:
        for _ in queue:
            file = draw.choice(others if draw.random() < _HOSTILE else files)
            data = file if file in others and draw.random() < 1 / 2 else mutated(file, draw)
            part = {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}
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
