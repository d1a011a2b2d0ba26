"""Tiny random models, shared by all tests. Nothing here reaches a network."""

import contextlib
import ctypes
import gc
import json
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, as transformers does

from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from model_runner.hub.repository import cache_folder, resolve_model
from model_runner.kernels.build import build_kernels
from model_runner.kernels.vector_math import prepare_vector_math
from model_runner.modules.loading import load_config, load_model
from tests import tiny_vocabulary

VOCAB_SIZE = 320
if TYPE_CHECKING:
    from server.api.body_worker import WorkerPool

with contextlib.suppress(ImportError):  # machines that only measure lack it
    import hypothesis

    hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
    hypothesis.settings.register_profile("fresh", deadline=None, max_examples=1000, print_blob=True)
    hypothesis.settings.load_profile("repeatable")  # --hypothesis-profile overrides it
prepare_vector_math()  # for oracles that compute before any runner
LIBC = ctypes.CDLL(None)
COMPILER_FLAGS: list[str] = []
"""Further ones for native libraries, of the command line."""
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 100,  # no multiple of a vector, so that tails are met
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # spreads the logits, so that the argmax is no coin toss
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session")
def workers() -> "Iterator[WorkerPool]":
    """The processes that check costly bodies, shared by all applications."""
    from server.api.body_worker import WorkerPool  # noqa: PLC0415  (tests of the runner need no server)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # needed by child processes that run the tests' code
        made = WorkerPool()
        yield made
        made.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The native kernels can be built in another way; tests/gpu can be tried out without a GPU."""
    parser.addoption(
        "--kernels-flags", default="", help="further compiler options for native libraries, as for a sanitizer"
    )
    parser.addoption("--gpu-tests-on", choices=("cuda", "cpu"), default="cuda", help="the device of tests/gpu")


def pytest_configure(config: pytest.Config) -> None:
    COMPILER_FLAGS.extend(shlex.split(config.getoption("--kernels-flags")))
    gc.disable()


def pytest_collection_finish() -> None:
    """Exempt modules and tests from garbage collection, which would go through millions of objects each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def give_back_memory() -> None:
    """Return what nothing uses any more to the system: the allocator keeps it for later otherwise, if it can."""
    gc.collect()
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)


def pytest_runtest_logfinish() -> None:
    """End this process after a fault of its GPU: xdist starts another, and the fault fails no tests but its own."""
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def tiny_config(family: str) -> PretrainedConfig:
    """A configuration of the family that runs in a millisecond."""
    makers: dict[str, Callable[[], PretrainedConfig]] = {
        "llama": lambda: LlamaConfig(**_COMMON),
        "qwen2": lambda: Qwen2Config(
            **{**_COMMON, "num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 56}
        ),
        "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=16),
        "mixtral": lambda: MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2),
        "qwen3_moe": lambda: Qwen3MoeConfig(
            **_COMMON, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=36
        ),
        "qwen2_moe": lambda: Qwen2MoeConfig(
            **_COMMON,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=36,
            shared_expert_intermediate_size=44,
        ),
        "gemma2": lambda: Gemma2Config(
            **_COMMON, head_dim=16, query_pre_attn_scalar=16, sliding_window=40, attn_logit_softcapping=5.0
        ),
        "gemma3": lambda: Gemma3TextConfig(
            **_COMMON, head_dim=16, query_pre_attn_scalar=16, sliding_window=40, sliding_window_pattern=2
        ),
        "gpt_oss": lambda: GptOssConfig(
            **_COMMON, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=40, swiglu_limit=2.0
        ),
        "llama4": lambda: Llama4TextConfig(
            **_COMMON,
            head_dim=16,
            intermediate_size_mlp=100,
            interleave_moe_layer_step=2,
            num_local_experts=4,
            no_rope_layers=[1, 0, 1],
            attention_chunk_size=48,
            floor_scale=16,
        ),
    }
    return makers[family]()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns a function from a family's name, and a size of the vocabulary, to a folder with a random model of it."""
    made: dict[tuple[str, int], Path] = {}

    def make(family: str, vocab_size: int = VOCAB_SIZE) -> Path:
        key = family, vocab_size
        if key not in made:
            torch.manual_seed(len(family))
            folder = tmp_path_factory.mktemp(family)
            config = tiny_config(family)
            config.vocab_size = vocab_size
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            # Runs go on to their length: generate() and the server must not differ by defaults of the checkpoint.
            (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
            tiny_vocabulary.tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    """The embedded model, converted at first use."""
    return resolve_model(None, Console(stderr=True)).path


def load_dense(folder: Path) -> Any:
    """A model of transformers in float32 with its own attention, of safetensors or a GGUF file."""
    model = load_model(folder, load_config(folder), torch.float32)
    is_capped = getattr(model.config, "attn_logit_softcapping", None) is not None  # some versions' sdpa ignores it
    model.set_attn_implementation("sdpa" if model._supports_sdpa and not is_capped else "eager")
    return model


@pytest.fixture(scope="session")
def kernels_library() -> Path:
    """The library of CPU kernels with all instruction sets, built at first use."""
    return build_kernels(cache_folder(), COMPILER_FLAGS, os.environ | {"SAMEWISE_KERNELS": "all"})
