"""Options that users of vLLM and llama.cpp type: each is translated, reported as needless, or answered with advice."""

import pytest
from typer.testing import CliRunner, Result

from server.cli import serve
from server.cli.foreign_flags import FOREIGN
from server.cli.main import app
from server.config import Settings

COMMON_VLLM = """
    --model --host --port --api-key --served-model-name --dtype --max-model-len --max-num-seqs
    --max-num-batched-tokens --gpu-memory-utilization --tensor-parallel-size --pipeline-parallel-size
    --data-parallel-size --quantization --kv-cache-dtype --block-size --enable-prefix-caching
    --no-enable-prefix-caching --enable-chunked-prefill --enforce-eager --swap-space --cpu-offload-gb
    --trust-remote-code --download-dir --load-format --tokenizer --tokenizer-mode --seed --generation-config
    --override-generation-config --hf-overrides --hf-token --enable-auto-tool-choice --tool-call-parser
    --reasoning-parser --speculative-config --enable-lora --lora-modules --limit-mm-per-prompt --scheduling-policy
    --allowed-origins --uvicorn-log-level --disable-log-requests --max-logprobs --logprobs-mode
    --otlp-traces-endpoint --kv-events-config --kv-transfer-config --shutdown-timeout --kv-cache-memory-bytes
    --async-scheduling
""".split()  # noqa: SIM905  (quotes would hide the names)
COMMON_LLAMA_CPP = """
    -m -hf -a -c --ctx-size -np -t -ngl -b -ub -fa -ctk -ctv --host --port --api-key --api-key-file --alias
    --jinja --metrics --slots --embedding --reranking --mlock --no-mmap --mmproj --lora -n --temp --top-k --top-p
    --min-p -s --no-webui -cb -md --draft-max --timeout --verbose
""".split()  # noqa: SIM905  (quotes would hide the names)


@pytest.fixture(autouse=True)
def read(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    found: list[Settings] = []
    monkeypatch.setattr(serve, "run", found.append)
    return found


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments])


def own_options() -> set[str]:
    return {f"--{name.replace('_', '-')}" for name in Settings.model_fields}


@pytest.mark.parametrize("name", sorted({*COMMON_VLLM, *COMMON_LLAMA_CPP}))
def test_every_common_option_is_known(name: str) -> None:
    assert name in FOREIGN or name in own_options() or name in ("-c", "--ctx-size")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "folder"], {"model": "folder"}),
        (["-m", "some.gguf"], {"model": "some.gguf"}),
        (["-hf", "user/repo"], {"model": "user/repo"}),
        (["--max_model_len", "128"], {"max_model_len": 128}),
        (["--allowed-origins", '["https://a.example", "https://b.example"]'],
         {"cors_origins": ("https://a.example", "https://b.example")}),
        (["--scheduling-policy=priority"], {"policy": "priority"}),
        (["--tool-call-parser", "hermes", "--enable-auto-tool-choice"], {"tool_parser": "hermes"}),
        (["--logprobs-mode", "processed_logprobs"], {"logprobs": "processed"}),
        (["--kv-cache-memory-bytes", "2G"], {"kv_cache_gib": 2.0}),
        (["--kv-cache-memory-bytes", "536870912"], {"kv_cache_gib": 0.5}),
        (["--shutdown-timeout", "7"], {"drain_grace_s": 7.0}),
        (["--dtype", "half"], {"dtype": "float16"}),
        (["--no-enable-prefix-caching"], {"prefix_caching": False}),
        (["--enforce-eager", "--trust-remote-code"], {"cuda_graphs": False}),
        (["-tp", "1", "--load-format", "auto"], {}),
        (["-c", "4096", "-np", "4"], {"max_model_len": 1024, "max_num_seqs": 4}),
        (["-c", "4096", "-np", "4", "--kv-unified"], {"max_model_len": 4096, "max_num_seqs": 4}),
        (["--ctx-size", "4096"], {"max_model_len": 4096}),
        (["-c", "0"], {}),
        (["-fa", "--jinja", "-cb", "-t", "3"], {"threads": 3}),
        (["-fa", "on", "--no-webui"], {"page": False}),
        (["-a", "name", "--api-key", "-m"], {"served_model_name": ("name",), "api_key": "-m"}),
    ],
)  # fmt: skip
def test_an_option_with_an_equal_here_is_translated(
    arguments: list[str], expected: dict[str, object], read: list[Settings]
) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert read == [Settings(**expected)]


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_nothing_is_ignored_in_silence(name: str) -> None:
    result = invoke(name, "1")
    is_model = name in ("--model", "-m", "-hf", "--hf-repo")
    assert is_model or name in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["--gpu-memory-utilization", "0.9"], "--kv-cache-gib"),
        (["-ngl", "99"], "--device"),
        (["--tensor-parallel-size", "2"], "replicas"),
        (["--load-format", "pt"], "Safetensors and GGUF"),
        (["--speculative-config", "{}"], "--speculation METHOD"),
        (["--seed", "1"], "`seed` with each request"),
        (["--temp", "0.7"], "generation_config.json"),
        (["--allowed-origins", "https://a.example"], "cannot read"),
        (["-fa", "off"], "leave it out"),
        (["-c", "many"], "cannot read 'many'"),
        (["-np"], "a value is missing"),
    ],
)
def test_an_option_without_an_equal_ends_the_start_with_advice(arguments: list[str], advice: str) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, advice in result.output) == (2, True), result.output
