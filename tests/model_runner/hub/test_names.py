"""Names of models, and which files they choose."""

import pytest

from model_runner.hub.access import ModelNotFoundError
from model_runner.hub.choice import Wanted, choose_gguf, choose_small, choose_weights, chooses_gguf
from model_runner.hub.names import FileUrl, HubName, StoreName, parse_name

FILES = [
    "README.md",
    "imatrix.gguf",
    "mmproj-model-f16.gguf",
    "model-BF16.gguf",
    "model-F16.gguf",
    "model-IQ4_XS.gguf",
    "model-Q4_K_M.gguf",
    "model-Q4_K_S.gguf",
    "model-Q8_0-00001-of-00002.gguf",
    "model-Q8_0-00002-of-00002.gguf",
    "mtp-model-Q8_0.gguf",
]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("gpt2", HubName("gpt2")),
        ("user/repo:Q4_K_M", HubName("user/repo", "Q4_K_M")),
        ("user/repo:model-Q4_K_M.gguf", HubName("user/repo", "model-Q4_K_M.gguf")),
        ("hf.co/user/repo:q8_0", HubName("user/repo", "q8_0")),
        ("huggingface.co/user/repo", HubName("user/repo")),
        ("https://huggingface.co/user/repo", HubName("user/repo")),
        ("https://hf.co/user/repo/", HubName("user/repo")),
        ("https://huggingface.co/user/repo/tree/v1", HubName("user/repo", revision="v1")),
        ("https://huggingface.co/user/repo/tree/refs%2Fpr%2F1/x", HubName("user/repo", revision="refs/pr/1")),
        (
            "https://huggingface.co/user/repo/resolve/main/a/b%20c.gguf?download=true",
            HubName("user/repo", file="a/b c.gguf", revision="main"),
        ),
        ("https://huggingface.co/user/repo/blob/v1/b.gguf", HubName("user/repo", file="b.gguf", revision="v1")),
        ("user/repo/folder/file.gguf", HubName("user/repo", file="folder/file.gguf")),
        ("https://example.com/a/file.gguf?download=true", FileUrl("https://example.com/a/file.gguf?download=true")),
        ("ollama:llama3.2:3b", StoreName("ollama", "llama3.2:3b")),
        ("LMStudio:publisher/repo", StoreName("lmstudio", "publisher/repo")),
    ],
)
def test_forms_of_names(text: str, name: object) -> None:
    assert parse_name(text) == name


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a hub name"),
        ("a/b/c", "not a hub name"),
        ("../user/repo", "not a hub name"),
        ("./model.gguf", "not a hub name"),
        ("/etc/passwd", "not a hub name"),
        ("missing.gguf", "not a folder or GGUF file on this machine"),
        ("llama3.2:3b", "ollama:NAME:TAG"),
        ("user/..", "not a hub name"),
        ("user/re--po", "not a hub name"),
        ("user/repo:../x", "not a hub name"),
        ("user/repo/../../x.gguf", "not a hub name"),
        ("https://huggingface.co/user/repo/resolve/main/..%2F..%2Fx.gguf", "not a hub name"),
        ("https://huggingface.co/user/repo/resolve/..%2F..%2Fx/y.gguf", "not a hub name"),
        ("https://huggingface.co/user/repo/resolve/main", "not a hub name"),
        ("https://example.com/", "not the URL of a GGUF file"),
        ("https://example.com/a%2F..%2Fb.gguf", None),
        ("https://example.com/a%1b[31m.gguf", "not the URL of a GGUF file"),
        ("https://me:secret@example.com/a.gguf", "a URL with a password is not accepted"),
        ("user/\x1b[31mrepo", r"'user/\\x1b\[31mrepo'"),
    ],
)
def test_what_is_no_name(text: str, reason: str | None) -> None:
    if reason is None:
        assert isinstance(name := parse_name(text), FileUrl)
        assert name.file == "b.gguf"
        return
    with pytest.raises(ModelNotFoundError, match=reason) as failure:
        parse_name(text)
    assert "secret" not in str(failure.value)
    assert str(failure.value).isprintable()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (HubName("user/repo"), "user/repo"),
        (HubName("user/repo", "Q8_0"), "user/repo:Q8_0"),
        (HubName("user/repo", file="a/big-Q8_0-00001-of-00002.gguf"), "big-Q8_0"),
        (FileUrl("https://example.com/a/small.gguf?x=1"), "small"),
        (StoreName("ollama", "llama3.2:3b"), "llama3.2:3b"),
    ],
)
def test_names_in_the_api(name: object, shown: str) -> None:
    assert str(name) == shown


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        (Wanted(), ["model-Q4_K_M.gguf"]),
        (Wanted("q4_k_m"), ["model-Q4_K_M.gguf"]),
        (Wanted("Q4_K_S"), ["model-Q4_K_S.gguf"]),
        (Wanted("F16"), ["model-F16.gguf"]),
        (Wanted("Q4_XS"), ["model-IQ4_XS.gguf"]),
        (Wanted("Q8_0"), ["model-Q8_0-00001-of-00002.gguf", "model-Q8_0-00002-of-00002.gguf"]),
        (Wanted("model-F16.gguf"), ["model-F16.gguf"]),
        (Wanted(file="model-F16.gguf"), ["model-F16.gguf"]),
    ],
)
def test_the_file_of_a_tag(wanted: Wanted, chosen: list[str]) -> None:
    assert choose_gguf(FILES, wanted, "user/repo") == chosen


def test_without_a_tag_the_preferred_ones_come_first() -> None:
    some = [file for file in FILES if "Q4_K_M" not in file]
    assert choose_gguf(some, Wanted(), "")[0] == "model-Q8_0-00001-of-00002.gguf"
    assert choose_gguf([file for file in some if "Q8_0" not in file], Wanted(), "") == ["model-BF16.gguf"]


@pytest.mark.parametrize(
    ("files", "wanted", "reason"),
    [
        (
            FILES,
            Wanted("Q6_K"),
            "^user/repo has no GGUF file for Q6_K; it has model-BF16.gguf, model-F16.gguf, .*-00001-of",
        ),
        (FILES, Wanted(file="x.gguf"), "^user/repo has no x.gguf; it has"),
        (FILES[:-2], Wanted("Q8_0"), "has not all 2 parts of model-Q8_0-00001-of-00002.gguf: model-Q8_0-00002"),
        (["a.bin", "b.txt"], Wanted(), "^user/repo has neither safetensors nor GGUF files; it has a.bin$"),
        (["mmproj.gguf"], Wanted("Q8_0"), "has neither safetensors nor GGUF files"),
        ([], Wanted(), "it has no weights"),
    ],
)
def test_a_file_that_is_not_there_names_those_that_are(files: list[str], wanted: Wanted, reason: str) -> None:
    with pytest.raises(ModelNotFoundError, match=reason):
        choose_gguf(files, wanted, "user/repo")


def test_safetensors_come_before_gguf_unless_a_tag_is_named() -> None:
    both = ["config.json", "model.safetensors", "model-Q8_0.gguf"]
    assert not chooses_gguf(both, Wanted())
    assert chooses_gguf(both, Wanted("Q8_0"))
    assert chooses_gguf(["original/model.safetensors", "model-Q8_0.gguf"], Wanted())


def test_the_small_files() -> None:
    paths = [
        *("config.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "1_Pooling/config.json"),
        "2_Dense/model.safetensors",
        *("additional_chat_templates/rag.jinja", "onnx/config.json", "original/params.json", "a.py", "README.md"),
    ]
    assert choose_small(paths, Wanted()) == paths[:7]
    heads = ["config.json", "heads.pt", "a/b.pt", "heads.safetensors"]
    assert choose_small(heads, Wanted(is_heads=True)) == ["config.json", "heads.pt", "heads.safetensors"]


def test_the_weights(tmp_path: object) -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert choose_weights([*shards, "consolidated.safetensors"], None, "") == shards
    assert choose_weights(["model.safetensors", "model.fp16.safetensors"], None, "") == ["model.safetensors"]
    assert choose_weights(["consolidated.safetensors"], None, "") == ["consolidated.safetensors"]
