"""The page served alone, for servers that have no more than OpenAI's API."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import sync_playwright
from typer.testing import CliRunner

from server.cli.main import app
from server.cli.page import _api_address
from server.page import gate

CHROMIUM = Path("/usr/bin/chromium")
# Shells start background programs, such as these tests, with SIGINT ignored, which child processes inherit.
HEEDING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import server.cli.main as cli"


@contextmanager
def page_before(base_url: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command on a free port; where it says that it is."""
    command = [sys.executable, "-c", f"{HEEDING}; cli.main()", "page", "--base-url", base_url, "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("Page "), line
        yield line.split()[1], process
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code after Ctrl-C, and what it had to say."""
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def test_the_root_leads_to_the_page_and_ctrl_c_ends_it(base_url: str) -> None:
    with page_before(base_url.removesuffix("/v1")) as (address, process):
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["Server", base_url]
        browser = {"accept": "text/html"}
        found = httpx.get(address, headers=browser, follow_redirects=True, timeout=60, trust_env=False)
        assert found.status_code == 200
        assert found.url.path == "/page/"
        assert "content-security-policy" in found.headers
        assert httpx.get(f"{address}v1/models", trust_env=False).status_code == 404
        assert httpx.get(address, headers={"host": "evil.example"}, trust_env=False).status_code == 403
        refused = "Refused a request to the host 'evil.example', which is not in allowed_hosts.\n"
        assert end(process) == (0, refused)


@pytest.mark.skipif(not CHROMIUM.exists(), reason="there is no Chromium")
def test_a_server_that_tells_nothing_of_itself(base_url: str) -> None:
    with page_before(base_url) as (address, process), sync_playwright() as playwright:
        with playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as browser:
            page = browser.new_page()
            page.goto(address)
            page.get_by_label("Your message").fill("What is it?")
            page.keyboard.press("Enter")
            page.get_by_text("Paris is it.").wait_for()
            page.get_by_role("tab", name="Server").click()
            page.get_by_text("This server has no metrics at /metrics").wait_for()
            assert page.get_by_text("Your recent requests").count() == 0
        assert end(process)[0] == 0


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://host:8000/v1/", "http://host:8000/v1"),
        ("https://host/openai/v1", "https://host/openai/v1"),
    ],
)
def test_addresses(given: str, meant: str) -> None:
    assert _api_address(given) == meant


def test_what_is_wrong_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = runner.invoke(app, ["page", "--port", str(port)])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"error: cannot listen on 127.0.0.1 port {port}: ")
    result = runner.invoke(app, ["page", "--base-url", "ftp://host"])
    assert (result.exit_code, result.stderr) == (2, "error: ftp://host is not an http or https address\n")
    monkeypatch.setattr(gate, "find_spec", lambda _: None)
    result = runner.invoke(app, ["page"])
    assert (result.exit_code, result.stderr) == (
        1,
        "error: the page is not installed; run `pip install 'samewise[page]'`\n",
    )
