"""Refused requests name the field, and leave nothing behind."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.server.files.calling import BATCH, FILES, LINES, listed, on_disk, sent, uploaded
from tests.server.helpers import client_of, error_of

FILE = {"file": ("in.jsonl", LINES)}
ANCHOR = {"expires_after[anchor]": "created_at"}
SECONDS = {"expires_after[seconds]": "3600"}
WRONG: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "no file": ({"data": BATCH, "files": {"x": (None, "")}}, "file", "missing_required_parameter", "Missing"),
    "a text for a file": ({"data": BATCH, "files": {"file": (None, LINES)}}, "file", "invalid_type", "with a name"),
    "a file without a name": ({"data": BATCH, "files": {"file": ("", LINES)}}, "file", "invalid_type", "with a name"),
    "an empty file": ({"data": BATCH, "files": {"file": ("x", b"")}}, "file", "invalid_value", "the file is empty"),
    "two files": ({"data": BATCH, "files": [*FILE.items()] * 2}, "file", "invalid_value", "sent twice"),
    "a long name": ({"data": BATCH, "files": {"file": ("x" * 256, LINES)}}, "file", "invalid_value", "255 characters"),
    "no purpose": ({"files": FILE}, "purpose", "missing_required_parameter", "Missing"),
    "another purpose": ({"data": {"purpose": "evals"}, "files": FILE}, "purpose", "unsupported_value", "only 'batch'"),
    "its own purpose": ({"data": {"purpose": "batch_output"}, "files": FILE}, "purpose", "unsupported_value", "only"),
    "a long purpose": ({"data": {"purpose": "x" * 9999}, "files": FILE}, "purpose", "unsupported_value", "only"),
    "two purposes": ({"data": {"purpose": ["batch"] * 2}, "files": FILE}, "purpose", "invalid_value", "sent twice"),
    "an object for a purpose": ({"data": {"purpose[a]": "batch"}, "files": FILE}, "purpose", "invalid_value", "batch"),
    "a misspelt field": ({"data": BATCH | {"purpos": "x"}, "files": FILE}, "purpos", "unknown_parameter", "'purpose'"),
    "a misspelt file": (
        {"data": BATCH, "files": {"fille": ("x", LINES * 999)}}, "fille", "unknown_parameter", "Did you mean 'file'?",
    ),
    "no anchor": ({"data": BATCH | SECONDS, "files": FILE}, "expires_after.anchor", "missing_required_parameter", ""),
    "no seconds": ({"data": BATCH | ANCHOR, "files": FILE}, "expires_after.seconds", "missing_required_parameter", ""),
    "another anchor": (
        {"data": BATCH | SECONDS | {"expires_after[anchor]": "now"}, "files": FILE},
        "expires_after.anchor", "invalid_value", "'created_at'",
    ),
    "too soon": (
        {"data": BATCH | ANCHOR | {"expires_after[seconds]": "3599"}, "files": FILE},
        "expires_after.seconds", "integer_below_min_value", ">= 3600",
    ),
    "too late": (
        {"data": BATCH | ANCHOR | {"expires_after[seconds]": "2592001"}, "files": FILE},
        "expires_after.seconds", "integer_above_max_value", "<= 2592000",
    ),
    "no number": (
        {"data": BATCH | ANCHOR | {"expires_after[seconds]": "soon"}, "files": FILE},
        "expires_after.seconds", "invalid_value", "valid integer",
    ),
    "a field of it that is none": (
        {"data": BATCH | ANCHOR | {"expires_after[second]": "3600"}, "files": FILE},
        "expires_after.second", "unknown_parameter", "Did you mean 'seconds'?",
    ),
    "a text for an object": (
        {"data": BATCH | ANCHOR | {"expires_after": "never"}, "files": FILE}, "expires_after", "invalid_type", "object",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_form_is_refused_by_its_field(client: httpx.AsyncClient, tmp_path: Path, case: str) -> None:
    form, param, code, says = WRONG[case]
    if case == "no file":
        form = {"content": part("purpose", "batch") + END, "headers": FORM}
    error = error_of(await client.post(FILES, **form))
    assert (error["param"], error["code"]) == (param, code), error
    assert says in error["message"]
    assert on_disk(tmp_path) == {}
    await uploaded(client)


FORM = {"content-type": "multipart/form-data; boundary=b"}
END = b"--b--\r\n"


def part(name: str, value: str, filename: str = "") -> bytes:
    more = f'; filename="{filename}"' if filename else ""
    return f'--b\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'.encode()


WHOLE = part("file", "x", "x") + part("purpose", "batch") + END
MALFORMED = {
    "nothing": b"",
    "no form": b"x=1&y=2",
    "cut off": WHOLE[: -len(END)],
    "cut off in the file": WHOLE[:80],
    "no name": b"--b\r\ncontent-disposition: form-data\r\n\r\nx\r\n" + WHOLE,
    "no header": b"--b\r\n\r\nx\r\n" + WHOLE,
    "a header that is none": b"--b\r\na b\r\n\r\nx\r\n" + WHOLE,
    "a long header": b"--b\r\na: " + b"x" * 100_000 + b"\r\n\r\nx\r\n" + WHOLE,
    "many headers": b"--b\r\n" + b"a: b\r\n" * 1000 + b"\r\nx\r\n" + WHOLE,
    "many fields": b"".join(part(f"field{number}", "x") for number in range(17)) + WHOLE,
}


@pytest.mark.parametrize("case", MALFORMED)
async def test_a_malformed_form(client: httpx.AsyncClient, tmp_path: Path, case: str) -> None:
    error = error_of(await client.post(FILES, content=MALFORMED[case], headers=FORM))
    assert (error["param"], error["code"]) == (None, None)
    assert ("fields is 16" if case == "many fields" else "is malformed") in error["message"]
    assert on_disk(tmp_path) == {}


async def test_a_form_in_any_pieces_and_any_order(client: httpx.AsyncClient) -> None:
    for size in (1, 7, len(WHOLE)):

        async def pieces(size: int = size) -> AsyncIterator[bytes]:
            for start in range(0, len(WHOLE), size):
                yield WHOLE[start : start + size]

        answer = await client.post(FILES, content=pieces(), headers=FORM)
        assert answer.status_code == 200, answer.text
        assert (await client.get(f"{FILES}/{answer.json()['id']}/content")).content == b"x"


@pytest.mark.parametrize(
    "declared",
    [None, "application/json", "multipart/form-data", "multipart/form-data; boundary=", "multipart/mixed; boundary=b"],
)
async def test_another_media_type(client: httpx.AsyncClient, declared: str | None) -> None:
    headers = {} if declared is None else {"content-type": declared}
    error = error_of(await client.post(FILES, content=WHOLE, headers=headers), 415)
    assert "multipart/form-data" in error["message"]


async def test_a_compressed_form_is_refused(client: httpx.AsyncClient) -> None:
    headers = {"content-type": FORM["content-type"], "content-encoding": "zstd"}
    assert "zstd" in error_of(await client.post(FILES, content=WHOLE, headers=headers), 415)["message"]


async def test_the_media_type_given_twice(client: httpx.AsyncClient) -> None:
    headers = [("content-type", FORM["content-type"])] * 2
    error_of(await client.post(FILES, content=WHOLE, headers=headers), 415)


async def test_a_long_boundary(client: httpx.AsyncClient) -> None:
    headers = {"content-type": f"multipart/form-data; boundary={'b' * 5000}"}
    error_of(await client.post(FILES, content=WHOLE, headers=headers))


async def test_a_file_may_be_so_large_and_no_larger(client: httpx.AsyncClient, tmp_path: Path) -> None:
    largest = b"x" * (1 << 20)
    assert (await uploaded(client, largest))["bytes"] == 1 << 20
    before = on_disk(tmp_path)
    error = error_of(await sent(client, largest + b"x"), 413)
    assert error["param"] == "file"
    assert "at most 1048576 bytes" in error["message"]
    whole = client.build_request("POST", FILES, data=BATCH, files={"file": ("in.jsonl", largest + b"x")})
    body = whole.read()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1 << 18):
            yield body[start : start + (1 << 18)]

    headers = {"content-type": whole.headers["content-type"]}
    error_of(await client.post(FILES, content=pieces(), headers=headers), 413)
    assert on_disk(tmp_path) == before


@pytest.mark.parametrize(("field", "declares"), [("file", True), ("file", False), ("purpose", False)])
async def test_what_is_far_too_large_is_not_read(
    client: httpx.AsyncClient, tmp_path: Path, field: str, declares: bool
) -> None:
    num_read = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal num_read
        yield part(field, "", "x").removesuffix(b"\r\n")
        for num_read in range(1, 100):  # noqa: B007
            yield b"x" * (1 << 18)

    headers = FORM | ({"content-length": str(100 << 18)} if declares else {})
    error_of(await client.post(FILES, content=pieces(), headers=headers), 413)
    assert num_read == (0 if declares else 5)
    assert on_disk(tmp_path) == {}


@pytest.mark.parametrize(
    ("query", "param", "code"),
    [
        ({"limit": 0}, "limit", "integer_below_min_value"),
        ({"limit": 10001}, "limit", "integer_above_max_value"),
        ({"order": "up"}, "order", "invalid_value"),
        ({"after": "file-0"}, "after", "invalid_value"),
        ({"afte": "x"}, "afte", "unknown_parameter"),
    ],
)
async def test_a_wrong_list(client: httpx.AsyncClient, query: dict[str, Any], param: str, code: str) -> None:
    error = error_of(await client.get(FILES, params=query))
    assert (error["param"], error["code"]) == (param, code)
    assert await listed(client, limit=10000) == []


@pytest.mark.parametrize("file_id", ["file-0", "..%2F..%2Fsamewise.sqlite3", "%00", "é", "x" * 2000])
async def test_there_is_no_such_file(client: httpx.AsyncClient, file_id: str) -> None:
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = await client.request(method, f"{FILES}/{file_id}{path}")
        error = error_of(answer, 404)
        assert error["message"].startswith(("No such File object: ", "Unknown request URL"))


async def test_without_a_folder_there_are_no_files(make_app: Callable[..., FastAPI]) -> None:
    async with client_of(make_app()) as client:
        answers = [await sent(client), await client.get(FILES)]
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            answers.append(await client.request(method, f"{FILES}/file-0{path}"))
    for answer in answers:
        error = error_of(answer)
        assert "--data-dir" in error["message"]
        assert error["code"] == "unsupported_value"
