"""A cluster of Ray on this machine, of which nothing is left afterwards."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
_LIMIT_S = 120.0
"""For what should take seconds: a replica starts three processes, which a busy machine slows down."""
_REPLICA = "ray::ServeReplica:default:Replica"
_CORES = 4
"""As Ray counts them: one for the ingress, one for each replica, one to spare."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(condition: Callable[[], bool], limit_s: float = _LIMIT_S) -> None:
    """Raises AssertionError if it does not hold in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s"
        time.sleep(0.1)


class Cluster:
    """A head node; Serve listens on its address while an application runs."""

    def __init__(self, folder: str) -> None:
        self._config = Path(folder) / "serve.yaml"
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self._gcs = f"127.0.0.1:{free_port()}"
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_ADDRESS": self._gcs,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
        }
        options = {
            "port": self._gcs.rpartition(":")[2],
            "node-ip-address": "127.0.0.1",
            "num-cpus": _CORES,
            "include-dashboard": "false",
            "dashboard-agent-listen-port": free_port(),
            "temp-dir": folder,
        }
        self.process = self._popen("ray", "start", "--head", "--block", *_flags(options))
        wait_for(lambda: self._run("ray", "health-check") == 0)

    def replica_pids(self) -> list[int]:
        """The processes of replicas, in no order."""
        return [pid for pid in _descendants(self.process.pid) if _command(pid).startswith(_REPLICA)]

    def engine_pids(self) -> list[int]:
        """The engine processes of all replicas."""
        return [pid for pid in _descendants(self.process.pid) if " server.engine.worker " in _command(pid)]

    @contextmanager
    def running(self, num_replicas: int = 1, **arguments: Any) -> Iterator[None]:
        """The application, with these arguments, from when it and this many replicas are ready. Ends the Serve instance
        afterwards.
        """
        application = {
            "name": "default",
            "route_prefix": "/",
            "import_path": "server.ray.application:build",
            "args": arguments,
        }
        http = {"host": "127.0.0.1", "port": self.port}
        self._config.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
        process = self._popen("serve", "run", str(self._config))
        try:
            wait_for(lambda: process.poll() is not None or self._is_ready(num_replicas))
            assert process.poll() is None
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(_LIMIT_S)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(_LIMIT_S)

    def _is_ready(self, num_replicas: int) -> bool:
        try:
            is_ready = httpx.get(f"{self.address}/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False
        return is_ready and len(self.replica_pids()) >= num_replicas

    def _popen(self, program: str, *arguments: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([BIN / program, *arguments], env=self._environment, cwd=ROOT)

    def _run(self, program: str, *arguments: str) -> int:
        quiet = subprocess.DEVNULL
        command = [BIN / program, *arguments]
        return subprocess.run(command, env=self._environment, stdout=quiet, stderr=quiet, check=False).returncode


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Ray's sockets have long paths, so their folder has a short one."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        started = Cluster(folder)
        try:
            yield started
        finally:
            started.stop()


def _flags(options: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _descendants(pid: int) -> Iterator[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield child
        yield from _descendants(child)
