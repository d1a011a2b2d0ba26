"""Pages of strangers that have a name of theirs lead to the server (DNS rebinding)."""

import socket
from typing import Any

import httpx
import pytest

from server.config import Settings
from server.http.draining_server import configure
from server.http.origins import guarded
from tests.cli.fake_openai import running
from tests.cli.test_upgrades import HANDSHAKE, Application

NEARBY = [
    *(
        "127.0.0.1:8000",
        "[::1]:8000",
        "[fe80::1]",
        "10.0.0.7",
        "localhost",
        "LOCALHOST:8000",
        "samewise:8000",
        "a.local",
    ),
    *("samewise.default.svc.cluster.local:8000", "host.docker.internal", "page.localhost", "nas.home.arpa", ""),
    "localhost.",
]
STRANGE = [
    *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example."),
    *("0x7f.1", "a.notlocal", "[evil.example]", "localhost:8000:9", "[::1", "evil.example:x"),
]


def with_host(app: Any, host: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", headers={"host": host})


@pytest.mark.parametrize("host", NEARBY)
async def test_names_that_nobody_can_register_are_taken(host: str) -> None:
    async with with_host(guarded(Application(), (), has_keys=False), host) as client:
        assert (await client.get("/")).text == "served"


@pytest.mark.parametrize("host", STRANGE)
async def test_other_names_are_refused(host: str) -> None:
    async with with_host(guarded(Application(), ("llm.example.com",), has_keys=False), host) as client:
        refused = await client.get("/v1/models")
    assert refused.status_code == 403
    assert f"The host '{host}' is not allowed." in refused.json()["error"]["message"]
    assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize(
    ("allowed", "has_keys", "host", "is_served"),
    [
        (("llm.example.com",), False, "LLM.example.com:443", True),
        (("llm.example.com",), False, "x.llm.example.com", False),
        (("*.example.com",), False, "llm.example.com", True),
        (("*.example.com",), False, "example.com", False),
        (("*.example.com",), False, "evilexample.com", False),
        (("llm.example.com",), True, "evil.example", False),
        (("*",), False, "evil.example", True),
        ((), True, "evil.example", True),
    ],
)
async def test_what_is_allowed(allowed: tuple[str, ...], has_keys: bool, host: str, is_served: bool) -> None:
    async with with_host(guarded(Application(), allowed, has_keys=has_keys), host) as client:
        assert (await client.get("/")).status_code == (200 if is_served else 403)


async def test_this_machine_s_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Box.lan")
    async with with_host(guarded(Application(), (), has_keys=False), "box.lan:8000") as client:
        assert (await client.get("/")).status_code == 200


@pytest.mark.parametrize(
    ("hosts", "status"),
    [(["evil.example"], b"403"), (["localhost"], b"101"), (["localhost", "evil.example"], b"400")],
)
def test_websockets_and_all_hosts_of_a_request_are_looked_at(hosts: list[str], status: bytes) -> None:
    app = guarded(Application(), (), has_keys=False)
    with running(app, configure(app, 20.0, {"/page/": 1 << 20})) as address:
        _, name, port = address.removesuffix("/v1").replace("//", "").split(":")
        with socket.create_connection((name, int(port)), timeout=20) as client:
            lines = "".join(f"host: {host}\r\n" for host in hosts).encode()
            client.sendall(b"GET /page/x HTTP/1.1\r\n" + lines + HANDSHAKE + b"\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize("host", ["https://llm.example.com", "llm.example.com:8000", "a/b", "*.*", "**", "-a"])
def test_what_is_no_name_is_no_setting(host: str) -> None:
    with pytest.raises(ValueError, match="is not a host name"):
        Settings(allowed_hosts=[host])  # type: ignore[arg-type]
