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
    --async-scheduling --chat-template --revision --code-revision --tokenizer-revision --ssl-certfile --ssl-keyfile
    --ssl-ca-certs --ssl-cert-reqs --enable-ssl-refresh --root-path --allowed-methods --allowed-headers
    --allow-credentials --enable-expert-parallel --compilation-config --max-seq-len-to-capture --middleware
    --response-role --chat-template-content-format --enable-prompt-tokens-details --enable-force-include-usage
    --disable-fastapi-docs --disable-uvicorn-access-log --disable-log-stats --enable-log-requests
    --enable-request-id-headers --guided-decoding-backend --api-server-count --config-format --rope-scaling --rope-theta
    --task --runner --return-tokens-as-token-ids --exclude-tools-when-tool-choice-none --max-num-partial-prefills
    --no-enable-chunked-prefill --config
""".split()  # noqa: SIM905  (quotes would hide the names)
COMMON_LLAMA_CPP = """
    -m -hf -a -c --ctx-size -np -t -ngl -b -ub -fa -ctk -ctv --host --port --api-key --api-key-file --alias
    --jinja --metrics --slots --embedding --reranking --mlock --no-mmap --mmproj --lora -n --temp --top-k --top-p
    --min-p -s --no-webui -cb -md --draft-max --timeout --verbose --chat-template --chat-template-file --ssl-key-file
    --ssl-cert-file -hft --api-prefix --threads-http --threads-batch --log-disable --props --reasoning-format --pooling
    --cache-reuse --slot-save-path --no-warmup --parallel --threads --hf-token
""".split()  # noqa: SIM905  (quotes would hide the names)


@pytest.fixture(autouse=True)
def read(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    found: list[Settings] = []
    monkeypatch.setattr(serve, "run", found.append)
    return found


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments])


def own_options() -> set[str]:
    return {f"--{name.replace('_', '-')}" for name in (*Settings.model_fields, "config")}


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
        (["--chat-template", "a.jinja", "--revision=v1"], {"chat_template": "a.jinja", "revision": "v1"}),
        (["--chat-template-file", "a.jinja"], {"chat_template": "a.jinja"}),
        (["--hf-token", "hf_x"], {"hub_token": "hf_x"}),
        (["--ssl-certfile", "a", "--ssl-keyfile", "b"], {"ssl_certfile": "a", "ssl_keyfile": "b"}),
        (["--ssl-cert-file", "a", "--ssl-key-file", "b"], {"ssl_certfile": "a", "ssl_keyfile": "b"}),
        (["--root-path", "/llm"], {"root_path": "/llm"}),
        (["--task", "auto", "--reasoning-format", "auto", "--disable-log-stats"], {}),
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
    is_model = name in ("--model", "-m", "-hf", "-hfr", "--hf-repo", "-mu", "--model-url")
    assert is_model or name in result.output
    assert "Traceback" not in result.output


def test_a_secret_is_not_repeated() -> None:
    result = invoke("--hf-token", "hf_hush")
    assert "--hf-token is --hub-token here." in result.output
    assert "hush" not in result.output


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
        (["-np"], "-np needs a value"),
        (["--ssl-ca-certs", "a"], "Certificates of clients are not checked"),
        (["--tokenizer-revision", "v1"], "--revision sets the revision of both"),
        (["--allow-credentials"], "pages of --cors-origins send a key"),
        (["--task", "embed"], "detected from the model"),
        (["--kv-cache-memory-bytes", "lots"], "cannot read 'lots'; use --kv-cache-gib instead"),
    ],
)
def test_an_option_without_an_equal_ends_the_start_with_advice(arguments: list[str], advice: str) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, advice in result.output) == (2, True), result.output
