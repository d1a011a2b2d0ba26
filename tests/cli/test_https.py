"""HTTPS: certificates that are refused with a reason, and a server and its page that speak it."""

import asyncio
import shutil
import ssl
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from server.assembly import StartError
from server.cli import lifecycle
from server.cli.main import app
from server.config import Settings
from server.http.certificate import Certificate, CertificateError
from tests.cli.test_lifecycle import ObservedEngine, Printed, end_by_signal
from tests.server.fake_engine import FakeEngine
from tests.server.tiny_model import write_folder
from tests.waiting import until

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make certificates")


def make_certificate(folder: Path, name: str, *, password: str | None = None) -> tuple[Path, Path]:
    """PEM files of a self-signed certificate for another name than this machine's, and of its key."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    secret = ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "1", "-subj", "/CN=llm.example.com"]
    command += ["-addext", "subjectAltName=DNS:llm.example.com,DNS:localhost"]
    subprocess.run([*command, *secret, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("certificates")
    make_certificate(path, "own")
    make_certificate(path, "other")
    make_certificate(path, "locked", password="secret")
    (path / "text").write_text("no certificate")
    return path


@pytest.mark.parametrize(
    ("certificate", "key", "password", "message"),
    [
        ("none.crt", "own.key", None, r"^ssl_certfile: .*none.crt: No such file or directory$"),
        ("own.crt", "none.key", None, r"^ssl_keyfile: .*none.key: No such file or directory$"),
        ("text", "own.key", None, r"^ssl_certfile: .*text is not a certificate in PEM format"),
        ("own.crt", "text", None, r"^ssl_keyfile: .*text is not a private key in PEM format"),
        ("own.crt", "other.key", None, r"^ssl_keyfile: .*other.key is the key of another certificate than .*own.crt$"),
        ("locked.crt", "locked.key", None, r"is encrypted and needs ssl_keyfile_password$"),
        ("locked.crt", "locked.key", "wrong", r"is encrypted and does not open with ssl_keyfile_password$"),
    ],
)
def test_what_cannot_be_used_is_refused(
    folder: Path, certificate: str, key: str, password: str | None, message: str
) -> None:
    with pytest.raises(CertificateError, match=message):
        Certificate(folder / certificate, folder / key, password).check()


def test_what_can_be_used(folder: Path) -> None:
    Certificate(folder / "own.crt", folder / "own.key").check()
    locked = Certificate(folder / "locked.crt", folder / "locked.key", "secret")
    locked.check()
    assert "secret" not in repr(locked)


def run(
    look_on: Callable[[FakeEngine], Awaitable[None]], model: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> None:
    engine = ObservedEngine(look_on)
    monkeypatch.setattr(lifecycle, "configure_logging", lambda *_: None)
    monkeypatch.setattr(lifecycle, "make_engine", lambda *_: engine)
    lifecycle.serve(Settings(model=str(model), port=0, **settings), time.perf_counter())
    assert engine.observer is not None
    engine.observer.result()


def test_the_server_its_page_and_clients_speak_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = Printed(capsys)

    async def look_on(engine: FakeEngine) -> None:
        try:
            await until(lambda: printed.has("Ready in"))
            address = printed.address
            assert address.startswith("https://127.0.0.1:")
            trusted = ssl.create_default_context(cafile=folder / "own.crt")
            by_name = address.replace("127.0.0.1", "localhost")
            async with httpx.AsyncClient(trust_env=False, verify=trusted) as client:
                assert (await client.get(f"{by_name}/health")).status_code == 200
                page = await client.get(f"{by_name}/page/", timeout=60)
                assert page.status_code == 200
                assert "No server answers" not in page.text
            port = address.rpartition(":")[2]
            refused = await asyncio.to_thread(chat, f"{by_name}/v1")
            assert "its certificate is not trusted; set the variable SSL_CERT_FILE" in refused
            monkeypatch.setenv("SSL_CERT_FILE", str(folder / "own.crt"))
            assert "certificate" not in await asyncio.to_thread(chat, f"https://localhost:{port}/v1")
        finally:
            end_by_signal()

    run(
        look_on,
        write_folder(tmp_path / "tiny"),
        monkeypatch,
        ssl_certfile=folder / "own.crt",
        ssl_keyfile=folder / "own.key",
        api_key="k",  # so that the page asks the server for its models, over HTTPS
    )


def chat(url: str) -> str:
    """All that the command prints about this server."""
    return CliRunner().invoke(app, ["chat", "--base-url", url, "--model", "x"], input="hi\n").output


def test_a_pair_that_does_not_match_ends_the_start(folder: Path, tmp_path: Path) -> None:
    settings = Settings(model=str(tmp_path), port=0, ssl_certfile=folder / "own.crt", ssl_keyfile=folder / "other.key")
    with pytest.raises(StartError, match="is the key of another certificate"):
        lifecycle.serve(settings, time.perf_counter())
