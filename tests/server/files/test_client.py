"""OpenAI's own client: all that it can do with files, over a socket."""

import hashlib
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from fastapi import FastAPI
from openai import OpenAI

from tests.server.files.calling import FILES, LINES
from tests.server.helpers import serving


@pytest.fixture
def address(app: FastAPI) -> Iterator[str]:
    with serving(app) as address:
        yield address


def test_a_file_from_its_upload_to_its_end(openai_client: OpenAI, tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_bytes(LINES)
    before = int(time.time())
    with (tmp_path / "requests.jsonl").open("rb") as file:
        made = openai_client.files.create(file=file, purpose="batch")
    assert (made.object, made.filename, made.purpose, made.status) == ("file", "requests.jsonl", "batch", "processed")
    assert (made.bytes, made.status_details) == (len(LINES), None)
    assert made.id.startswith("file-")
    assert before <= made.created_at <= time.time()
    assert made.expires_at == made.created_at + 30 * 86400
    assert openai_client.files.retrieve(made.id) == made
    assert openai_client.files.wait_for_processing(made.id) == made
    content = openai_client.files.content(made.id)
    assert content.read() == LINES
    assert content.response.headers["content-type"] == "application/octet-stream"
    assert content.response.headers["content-length"] == str(len(LINES))
    assert content.response.headers["content-disposition"] == 'attachment; filename="requests.jsonl"'
    assert list(openai_client.files.list()) == [made]
    deleted = openai_client.files.delete(made.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "file", True)
    assert list(openai_client.files.list()) == []
    for gone in (openai_client.files.retrieve, openai_client.files.content, openai_client.files.delete):
        with pytest.raises(openai.NotFoundError, match=f"No such File object: {made.id}"):
            gone(made.id)


def test_its_own_time_and_name(openai_client: OpenAI) -> None:
    made = openai_client.files.create(
        file=('../é"€.jsonl', LINES), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == made.created_at + 3600
    assert made.filename == "../é%22€.jsonl"  # as the client writes it
    disposition = openai_client.files.content(made.id).response.headers["content-disposition"]
    assert disposition == "attachment; filename*=utf-8''..%2F%C3%A9%2522%E2%82%AC.jsonl"


def test_pages(openai_client: OpenAI) -> None:
    made = [openai_client.files.create(file=(f"{n}.jsonl", LINES), purpose="batch").id for n in range(5)]
    assert [one.id for one in openai_client.files.list(order="asc")] == made
    assert [one.id for one in openai_client.files.list(limit=2)] == made[::-1], "over all pages"
    page = openai_client.files.list(limit=2, order="asc", after=made[1])
    assert [one.id for one in page.data] == made[2:4]
    assert page.has_more
    assert not openai_client.files.list(limit=2, order="asc", after=made[2]).has_more
    assert list(openai_client.files.list(purpose="batch_output")) == []
    assert len(list(openai_client.files.list(purpose="batch"))) == 5


def test_whoever_reads_a_file_that_is_deleted_gets_all_of_it(make_app: Callable[..., FastAPI], tmp_path: Path) -> None:
    content = random.Random(1).randbytes(24 << 20)  # more than sockets hold
    with serving(make_app(data_dir=tmp_path)) as address, httpx.Client(base_url=address) as client:
        made = client.post(FILES, data={"purpose": "batch"}, files={"file": ("x", content)}).json()
        path = f"{FILES}/{made['id']}"
        with client.stream("GET", path + "/content") as answer:
            assert client.delete(path).json()["deleted"]
            assert client.get(path + "/content").status_code == 404
            read = hashlib.sha256()
            for piece in answer.iter_raw():
                read.update(piece)
    assert read.digest() == hashlib.sha256(content).digest()


def test_a_client_that_leaves_in_the_middle_leaves_nothing(address: str, tmp_path: Path) -> None:
    host, port = address.removeprefix("http://").split(":")
    head = f"POST /v1/files HTTP/1.1\r\nhost: {host}\r\ncontent-length: 100000\r\n"
    head += "content-type: multipart/form-data; boundary=b\r\n\r\n"
    part = '--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall((head + part + "x" * 5000).encode())
        _until(lambda: any(path.stat().st_size for path in (tmp_path / "files").iterdir()))
    _until(lambda: not list((tmp_path / "files").iterdir()))


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
