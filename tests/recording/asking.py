"""Serves the models of a recording with `samewise serve`, and asks them all their requests over HTTP."""

import asyncio
import functools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from bench.local_server import local_server
from tests.recording.instruction_sets import variables_of
from tests.recording.models import EMBEDDED, ENCODERS, INTERPRETED_MODELS, MODELS, RecordedModel, digest, has_embedded
from tests.recording.recording import Recording, content_of, header_of
from tests.recording.requests import RecordedRequest, requests_of

_TOGETHER = 2
"""Servers that run at the same time, so that one starts while another answers."""
_TIMEOUT_S = 600.0
_SETTINGS: Mapping[str, Any] = {"page": False, "log_level": "error"}
_OF_CPU: Mapping[str, Any] = {"device": "cpu", "threads": 1, "kv_cache_gib": 0.05}
_OF_INTERPRETER: Mapping[str, Any] = {"kv_cache_gib": 0.0002, "max_model_len": 256, "max_num_seqs": 8, "block_size": 16}
_PROGRAMS = {"interpreted": ("-m", "tests.recording.interpreted_cuda", "serve")}
_PROGRAM = ("-m", "samewise", "serve")


def models_for(isa: str, names: Sequence[str], console: Console) -> dict[str, RecordedModel]:
    """The models to record. Raises ValueError for an unknown name."""
    models = dict(INTERPRETED_MODELS if isa == "interpreted" else MODELS)
    if EMBEDDED in models and not has_embedded():
        console.print(f"{EMBEDDED} is skipped, because it is not installed (`make test` installs it)")
        del models[EMBEDDED]
    if unknown := [name for name in names if name not in models]:
        raise ValueError(f"no model is named {unknown[0]!r}; there are {', '.join(models)}")
    return {name: model for name, model in models.items() if not names or name in names}


def record(isa: str, names: Sequence[str], cache: Path, scratch: Path, console: Console) -> Recording:
    """Write the models, serve them, and record their answers. All requests to a model that does not start fail.

    Args:
        isa: the instruction set, one of ISAS.
        names: of models; all of them if it is empty.
        cache: folder for compiled kernels, which are kept.
        scratch: an empty folder for the models.
        console: says what is done.

    Raises:
        ValueError: if the processor lacks the instruction set, or a name is unknown.
    """
    models = models_for(isa, names, console)
    settings = {name: _written(model, scratch / name) for name, model in models.items()}
    digests = {name: digest(scratch / name) if (scratch / name).exists() else name for name in models}
    of_device = _OF_INTERPRETER if isa == "interpreted" else _OF_CPU
    start = functools.partial(local_server, program=_PROGRAMS.get(isa, _PROGRAM), variables=variables_of(isa, cache))

    async def record_all() -> list[dict[str, Any]]:
        together = asyncio.Semaphore(_TOGETHER)

        async def of_model(name: str) -> dict[str, Any]:
            async with together:
                begun = time.perf_counter()
                given = {**_SETTINGS, **of_device, **settings[name], "served_model_name": [name]}
                if models[name].kind in ENCODERS:
                    del given["kv_cache_gib"]
                config = scratch / f"{name}.yaml"
                config.write_text(json.dumps(given), encoding="utf-8")  # which is YAML, too
                requests = requests_of(models[name])
                try:
                    async with start(["--config", str(config)]) as server:
                        answers = await _ask(server.url, name, requests)
                except RuntimeError as error:  # others are still recorded
                    failed = content_of(503, {"error": {"message": str(error)}})
                    answers = dict.fromkeys((request.name for request in requests), failed)
                console.print(f"{name:28} {len(answers):3} answers {time.perf_counter() - begun:6.1f} s", markup=False)
                return answers

        return await asyncio.gather(*map(of_model, models))

    answers = asyncio.run(record_all())
    return Recording(header_of(isa), digests, dict(zip(models, answers, strict=True)))


def _written(model: RecordedModel, folder: Path) -> dict[str, Any]:
    """Write the model; returns its settings."""
    settings: dict[str, Any] = {"model": str(model.write(folder)), **model.settings}
    for name in model.folders:
        value = settings[name]
        settings[name] = [str(folder / one) for one in value] if isinstance(value, list) else str(folder / value)
    return settings


async def _ask(url: str, model: str, requests: Sequence[RecordedRequest]) -> dict[str, Any]:
    """The answers of one model: first of the requests that run alone, one by one, then of the others together."""
    client = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False)

    async def one(request: RecordedRequest) -> dict[str, Any]:
        response = await client.post(request.path, json={**request.body, "model": model})
        return content_of(response.status_code, response.json())

    alone = [request for request in requests if request.is_alone]
    crowd = [request for request in requests if not request.is_alone]
    async with client:
        answers = {request.name: await one(request) for request in alone}
        together = await asyncio.gather(*map(one, crowd))
    return answers | {request.name: answer for request, answer in zip(crowd, together, strict=True)}
