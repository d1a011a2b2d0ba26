"""A server whose engine runs the CUDA path in Triton's interpreter: `python -m tests.recording.interpreted_cuda serve`.

As a module, this is also what builds the engine in its process.
"""

import functools

from server.engine.loop import LoadedEngine
from server.engine.messages import EngineConfig

_GRAPH_SIZES = (1, 2)


def load(config: EngineConfig) -> LoadedEngine:
    """Load an engine on the interpreted CUDA path."""
    import pytest  # noqa: PLC0415  (the server's process needs none of these)

    from model_runner import assemble  # noqa: PLC0415
    from server.engine import building  # noqa: PLC0415
    from tests.model_runner.triton.interpreted_cuda import InterpretedCuda  # noqa: PLC0415
    from tests.model_runner.triton.mended_interpreter import mend  # noqa: PLC0415

    mend(pytest.MonkeyPatch())
    assemble.choose_platform = functools.partial(InterpretedCuda, graph_sizes=_GRAPH_SIZES, tries_mixing=False)
    return building.load(config)


def main() -> None:
    """Run the command line of samewise with an engine of this module."""
    from server.cli.main import app  # noqa: PLC0415
    from server.engine.process import ProcessLink  # noqa: PLC0415

    opened = ProcessLink.open.__func__
    ProcessLink.open = classmethod(functools.partial(opened, factory="tests.recording.interpreted_cuda"))
    app()


if __name__ == "__main__":
    main()
