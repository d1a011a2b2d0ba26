"""The fingerprint changes with whatever may change an answer, and with nothing else."""

import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from fastapi import FastAPI

from model_runner.hub.repository import ModelFolder, hash_file
from model_runner.runner_interface import RunnerInfo
from server.config import Settings
from server.generation import fingerprint
from server.generation.fingerprint import Fingerprint
from tests.server.helpers import CHAT, chat, client_of
from tests.server.tiny_model import write_folder

INFO = RunnerInfo(
    *(9, 64, 16, 8, 4, 512, "cpu", "int8"),
    kv_dtype="bfloat16",
    kernels="avx2",
    activation_type="int8",
    hardware="AVX2",
    software="torch 1",
)


async def test_answers_of_the_same_server_have_the_same(make_app: Callable[..., FastAPI], tmp_path: Path):
    async def of(app: FastAPI) -> str:
        async with client_of(app) as client:
            return (await client.post(CHAT, json=chat())).json()["system_fingerprint"]

    first = await of(make_app())
    assert first == await of(make_app(max_waiting=7, served_model_name="tiny"))
    aux = ModelFolder(write_folder(tmp_path / "a"), "a")
    others = [make_app(logprobs="processed"), make_app(exact=False), make_app(aux=aux), make_app(max_model_len=64)]
    others.append(make_app(write_folder(tmp_path / "m", generation={"temperature": 0.5})))
    assert len({first, *[await of(app) for app in others]}) == 6


async def test_how_the_model_runs(folder: Path):
    changes = [
        {},
        {"dtype": "float32"},
        {"kv_dtype": "int8"},
        {"activation_type": "int16"},
        {"kernels": "portable"},
        {"block_size": 32},
    ]
    changes += [{"max_model_len": 65}, {"hardware": "AVX512"}, {"software": "torch 2"}, {"device": "cuda:0"}]
    one = Fingerprint([folder], Settings())
    assert len({await one.of(replace(INFO, **change)) for change in changes}) == len(changes)
    assert await one.of(replace(INFO, num_blocks=99)) == await one.of(INFO)


async def test_every_byte_of_the_files_counts(tmp_path: Path):
    weights = tmp_path / "model.safetensors"
    seen = []
    for last in (b"a", b"b"):
        weights.write_bytes(bytes(100_000) + last)
        seen.append(await Fingerprint([tmp_path], Settings()).of(INFO))
    weights.rename(tmp_path / "other.safetensors")
    seen.append(await Fingerprint([tmp_path], Settings()).of(INFO))
    assert len(set(seen)) == 3


async def test_the_files_that_decide_answers_count(tmp_path: Path):
    module = tmp_path / "1_Pooling" / "config.json"
    module.parent.mkdir()
    seen = []
    for path in (
        tmp_path / "model.safetensors",
        module,
        tmp_path / "README.md",
        tmp_path / "consolidated.safetensors",
        tmp_path / "model.gguf",
        tmp_path / "config.json",
    ):
        path.write_text(f'{{"of": "{path.name}"}}')
        seen.append(await Fingerprint([tmp_path], Settings()).of(INFO))
    weights, pooling, *others, configured = seen
    assert len({weights, pooling, configured}) == 3
    assert set(others) == {pooling}


async def test_nothing_waits_for_the_hash_but_answers_and_readiness(
    folder: Path, make_app: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
):
    may_end = threading.Event()

    def slowly(path: Path, cache: Path) -> str:
        may_end.wait(10)
        return hash_file(path, cache)

    monkeypatch.setattr(fingerprint, "hash_file", slowly)
    async with client_of(make_app()) as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        may_end.set()
        assert (await client.post(CHAT, json=chat())).status_code == 200
        assert (await client.get("/ready")).status_code == 200


async def test_a_file_that_cannot_be_read_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(path: Path, cache: Path) -> str:
        raise OSError("broken disk")

    monkeypatch.setattr(fingerprint, "hash_file", fail)
    broken = Fingerprint([folder], Settings())
    for _ in range(2):
        with pytest.raises(OSError, match="broken disk"):
            await broken.wait_known()
        with pytest.raises(OSError, match="broken disk"):
            await broken.of(INFO)
    assert not broken.is_known


async def test_a_library_that_is_not_installed_has_no_version(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Pillow comes with an extra: a server of texts alone may lack it."""
    known = await Fingerprint([folder], Settings()).of(INFO)

    def without_pillow(name: str) -> str:
        if name == "pillow":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(fingerprint, "version", without_pillow)
    fingerprint._libraries.cache_clear()
    try:
        assert await Fingerprint([folder], Settings()).of(INFO) != known
    finally:
        fingerprint._libraries.cache_clear()
