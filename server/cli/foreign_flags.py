"""Options of vLLM and llama.cpp: translated if they mean exactly the same here, otherwise refused with advice.

No option is ignored in silence: the command reports each that it translates or does not need.
"""

import itertools
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from model_runner.read_numbers import whole_number

MODEL = "MODEL"
"""In place of an option: the positional argument."""


class ForeignFlagError(ValueError):
    """An option of another server has no equal here. The message names it and says what to do."""


def _same(value: str) -> Sequence[str]:
    return (value,)


def _listed(value: str) -> Sequence[str]:
    """The entries of a JSON list."""
    entries = json.loads(value)
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ValueError(value)
    return entries


def _gib(value: str) -> Sequence[str]:
    """Bytes, which may have vLLM's suffixes, as GiB."""
    units = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    number = float(value[:-1]) * units[value[-1]] if value[-1:] in units else float(value)
    return (f"{number / (1 << 30):g}",)


@dataclass(frozen=True, slots=True)
class Translated:
    """An option with another name here. `ours` is given once for each value that `values` returns."""

    ours: str
    values: Callable[[str], Sequence[str]] = _same
    takes_value: bool = True


@dataclass(frozen=True, slots=True)
class Needless:
    """An option for something that this server always does. With `only`, `otherwise` refuses other values."""

    reason: str
    takes_value: bool = False
    only: frozenset[str] = frozenset()
    """The values that change nothing; empty for all values."""
    otherwise: str = ""
    may_be_bare: bool = False
    """Whether the value may be left out."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An option that has no equal here."""

    advice: str


Foreign = Translated | Needless | Refused
_PARALLEL = (
    "A model runs on one device here; for more throughput run replicas, see docs/how-to/ray.md and "
    "docs/how-to/kubernetes.md."
)
_PER_REQUEST = "Send it with each request, or put it into the model's generation_config.json."
_ADAPTERS = "Adapters are not supported: merge them into the model's weights."
_SEVERAL = "Give each model an entry in `models` in the YAML file of --config, or name several models after `serve`."
_IMAGES = "The image tower is part of the model's folder; --max-images limits the images of a request."


def _one(reason: str) -> Needless:
    return Needless(reason, takes_value=True, only=frozenset({"1"}), otherwise=_PARALLEL)


def _auto(reason: str, otherwise: str) -> Needless:
    return Needless(reason, takes_value=True, only=frozenset({"auto"}), otherwise=otherwise)


_FLASH = Needless(
    "Attention is always computed in tiles.",
    takes_value=True,
    only=frozenset({"on", "auto", "1"}),
    otherwise="Attention is always computed in tiles; leave it out.",
    may_be_bare=True,
)

FOREIGN: Mapping[str, Foreign] = {
    # vLLM
    "--model": Translated(MODEL),
    "--allowed-origins": Translated("--cors-origins", _listed),
    "--scheduling-policy": Translated("--policy"),
    "--tool-call-parser": Translated("--tool-parser"),
    "--logprobs-mode": Translated("--logprobs", lambda value: (value.removesuffix("_logprobs"),)),
    "--kv-cache-memory-bytes": Translated("--kv-cache-gib", _gib),
    "--shutdown-timeout": Translated("--drain-grace-s"),
    "--uvicorn-log-level": Translated("--log-level"),
    "--spec-tokens": Translated("--num-draft-tokens"),
    "--enable-prefix-caching": Translated("--prefix-caching", takes_value=False),
    "--no-enable-prefix-caching": Translated("--no-prefix-caching", takes_value=False),
    "--enforce-eager": Translated("--no-cuda-graphs", takes_value=False),
    "--hf-token": Translated("--hub-token"),
    "--ssl-cert-file": Translated("--ssl-certfile"),
    "--ssl-key-file": Translated("--ssl-keyfile"),
    "--no-enable-chunked-prefill": Refused("Prompts are always computed in chunks; leave it out."),
    "--ssl-ca-certs": Refused("Certificates of clients are not checked: give --api-key, or let a proxy check them."),
    "--ssl-cert-reqs": Refused("Certificates of clients are not checked: give --api-key, or let a proxy check them."),
    "--enable-ssl-refresh": Refused("Certificates are read at the start: restart the server after a renewal."),
    "--code-revision": Refused("Code from a model's folder is never run; leave it out."),
    "--tokenizer-revision": Refused("The tokenizer is the model's own: --revision sets the revision of both."),
    "--allowed-methods": Refused("Pages of --cors-origins may send every method and header; leave it out."),
    "--allowed-headers": Refused("Pages of --cors-origins may send every method and header; leave it out."),
    "--allow-credentials": Refused("Browsers send no cookies here: pages of --cors-origins send a key in a header."),
    "--enable-expert-parallel": Refused(_PARALLEL),
    "--max-seq-len-to-capture": Refused(
        "On CUDA, small steps are replayed from graphs; --no-cuda-graphs turns it off."
    ),
    "--compilation-config": Refused(
        "--no-exact compiles what has no kernels here; --no-cuda-graphs turns CUDA graphs off."
    ),
    "--max-num-partial-prefills": Refused("--max-num-batched-tokens bounds the prompt tokens of one step."),
    "--max-parallel-loading-workers": Refused("Weights are read by one process; leave it out."),
    "--response-role": Refused("The role of an answer is always assistant, as in OpenAI's API; leave it out."),
    "--chat-template-content-format": _auto(
        "The template gets contents as it shows them, as text or as parts.",
        "The template gets contents as it shows them, as text or as parts; leave it out.",
    ),
    "--enable-reasoning": Needless("Reasoning is returned separately if the model has any."),
    "--enable-prompt-tokens-details": Needless("Usage always has the cached tokens of a prompt."),
    "--enable-force-include-usage": Refused("Send `stream_options` with `include_usage` in each request."),
    "--disable-fastapi-docs": Refused("/docs and /openapi.json are always there; block them in a proxy."),
    "--disable-uvicorn-access-log": Refused("Use --log-level warning."),
    "--disable-log-stats": Needless("Statistics are at /metrics and are not logged."),
    "--enable-log-requests": Refused("Each request has a log line; --log-prompts adds prompts and answers."),
    "--enable-request-id-headers": Needless("Every answer has the header x-request-id."),
    "--guided-decoding-backend": _auto("The backend is always llguidance.", "The backend is always llguidance."),
    "--middleware": Refused("Code cannot be added to the server: use a proxy."),
    "--api-server-count": _one("One process serves the API."),
    "--config-format": _auto("The format is detected.", "Only config.json is read."),
    "--rope-scaling": Refused("Put `rope_scaling` into the model's config.json."),
    "--rope-theta": Refused("Put `rope_theta` into the model's config.json."),
    "--task": _auto("The task is detected from the model.", "The task is detected from the model; leave it out."),
    "--runner": _auto("The task is detected from the model.", "The task is detected from the model; leave it out."),
    "--disable-cascade-attn": Needless("There is no cascade attention."),
    "--numa-bind": Refused("Start the server under numactl."),
    "--return-tokens-as-token-ids": Refused("Send the field return_tokens_as_token_ids with each request."),
    "--exclude-tools-when-tool-choice-none": Refused(
        "Send the field exclude_tools_when_tool_choice_none with each request."
    ),
    "--enable-auto-tool-choice": Needless("Tools are always offered to the model."),
    "--enable-chunked-prefill": Needless("Prompts are always computed in chunks."),
    "--async-scheduling": Needless("On CUDA, the next step is launched while the current one runs, where it can be."),
    "--disable-log-requests": Needless("Prompts are never logged unless --log-prompts is given."),
    "--no-enable-log-requests": Needless("Prompts are never logged unless --log-prompts is given."),
    "--trust-remote-code": Needless("Code from a model's folder is never run; a model that needs it is refused."),
    "--tensor-parallel-size": _one("A model runs on one device."),
    "--pipeline-parallel-size": _one("A model runs on one device."),
    "--data-parallel-size": _one("This is one replica."),
    "--load-format": _auto("The format is found out.", "Safetensors and GGUF are read; the format is found out."),
    "--tokenizer-mode": _auto(
        "The tokenizer is read from the model's files.", "The tokenizer is read from the model's files; leave it out."
    ),
    "--generation-config": _auto(
        "generation_config.json has the model's defaults.",
        "Defaults always come from the model's generation_config.json; remove the file to be without.",
    ),
    "--gpu-memory-utilization": Refused(
        "--kv-cache-gib sets the memory of the KV cache in GiB; by default it is a share of what is free."
    ),
    "--swap-space": Refused("Preempted requests are computed again instead of swapped; leave it out."),
    "--cpu-offload-gb": Refused(
        "A model is on one device. If it does not fit, use --quantization int4 or --device cpu."
    ),
    "--max-num-queued-reqs": Refused("--max-waiting limits the choices (answers) that wait."),
    "--seed": Refused("Send `seed` with each request. Without one, each request gets a seed that its answer reports."),
    "--override-generation-config": Refused("Put the values into the model's generation_config.json."),
    "--speculative-config": Refused("Use --speculation METHOD, with --draft-model or --heads; `auto` is the default."),
    "--kv-transfer-config": Refused("KV caches are not transferred between servers."),
    "--kv-events-config": Refused("Use --kv-events tcp://*:5557, with --kv-events-topic and --kv-events-replay."),
    "--tokenizer": Refused("The tokenizer is read from the model's folder."),
    "--hf-overrides": Refused("Change the model's config.json."),
    "--enable-lora": Refused(_ADAPTERS),
    "--lora-modules": Refused(_ADAPTERS),
    "--limit-mm-per-prompt": Refused(_IMAGES),
    "--allowed-media-domains": Refused("Name each host by --image-hosts; it needs https and a public address."),
    "--allowed-local-media-path": Refused("The server's own files are never read for a client; send data URLs."),
    "--download-dir": Refused("Set the variable HF_HOME; models are kept in the hub's own cache."),
    # llama.cpp
    "-m": Translated(MODEL),
    "-hf": Translated(MODEL),
    "-hfr": Translated(MODEL),
    "--hf-repo": Translated(MODEL),
    "-hff": Refused("Name the file in the model: USER/REPO/FILE.gguf, or USER/REPO:TAG."),
    "--hf-file": Refused("Name the file in the model: USER/REPO/FILE.gguf, or USER/REPO:TAG."),
    "-mu": Translated(MODEL),
    "--model-url": Translated(MODEL),
    "-hfd": Translated("--draft-model"),
    "--hf-repo-draft": Translated("--draft-model"),
    "--offline": Needless("A start asks the network only for what is not known to be complete on disk."),
    "--models-dir": Refused(_SEVERAL),
    "--models-preset": Refused(_SEVERAL),
    "--models-max": Refused("Models are loaded while memory lasts, and --memory-gib limits it; leave it out."),
    "--models-autoload": Needless("A request for a model loads it."),
    "--no-models-autoload": Refused("A request for a model loads it; leave it out."),
    "--sleep-idle-seconds": Refused("Set `idle_s` in the model's entry in `models` in the YAML file of --config."),
    "-a": Translated("--served-model-name"),
    "--alias": Translated("--served-model-name"),
    "-np": Translated("--max-num-seqs"),
    "--parallel": Translated("--max-num-seqs"),
    "-t": Translated("--threads"),
    "-to": Translated("--client-timeout-s"),
    "--timeout": Translated("--client-timeout-s"),
    "--api-key-file": Translated("--api-keys-file"),
    "-md": Translated("--draft-model"),
    "--model-draft": Translated("--draft-model"),
    "--draft": Translated("--num-draft-tokens"),
    "--draft-max": Translated("--num-draft-tokens"),
    "--no-webui": Translated("--no-page", takes_value=False),
    "--jinja": Needless("Chat templates are always rendered by Jinja."),
    "--chat-template-file": Translated("--chat-template"),
    "-hft": Translated("--hub-token"),
    "--api-prefix": Refused("Use --root-path behind a proxy that strips the path; other prefixes are not served."),
    "--path": Refused("Static files are not served: use a web server."),
    "--threads-http": Refused("HTTP needs no threads; leave it out."),
    "-tb": Refused("--threads is for prompts and answers alike."),
    "--threads-batch": Refused("--threads is for prompts and answers alike."),
    "--log-disable": Refused("Use --log-level error."),
    "--props": Refused("Settings cannot be changed while the server runs; /props can be read."),
    "--no-slots": Refused("/slots is always there; block it in a proxy."),
    "--no-warmup": Refused("The first step is always run at the start; leave it out."),
    "--pooling": Refused("How a model pools is read from its folder."),
    "--reasoning-format": Needless(
        "Reasoning is returned separately.",
        takes_value=True,
        only=frozenset({"auto", "deepseek"}),
        otherwise="Use --reasoning-parser none to get reasoning as part of the text.",
    ),
    "--cache-reuse": Refused("Only prefixes are reused; leave it out."),
    "--slot-save-path": Refused("KV caches are not saved; leave it out."),
    "-cb": Needless("Requests are always batched continuously."),
    "--cont-batching": Needless("Requests are always batched continuously."),
    "--metrics": Needless("/metrics is always there."),
    "--slots": Needless("/slots is always there."),
    "--embedding": Needless("A model for embeddings is recognised."),
    "--embeddings": Needless("A model for embeddings is recognised."),
    "--reranking": Needless("A model for reranking is recognised."),
    "-fa": _FLASH,
    "--flash-attn": _FLASH,
    "-kvu": Needless("The KV cache is always shared between requests."),
    "--kv-unified": Needless("The KV cache is always shared between requests."),
    "-v": Refused("Use --log-level debug."),
    "--verbose": Refused("Use --log-level debug."),
    "-ngl": Refused("A model is on one device: --device cuda or --device cpu."),
    "--n-gpu-layers": Refused("A model is on one device: --device cuda or --device cpu."),
    "--gpu-layers": Refused("A model is on one device: --device cuda or --device cpu."),
    "-b": Refused("--max-num-batched-tokens is the number of tokens computed in one step."),
    "--batch-size": Refused("--max-num-batched-tokens is the number of tokens computed in one step."),
    "-ub": Refused("--max-num-batched-tokens is the number of tokens computed in one step."),
    "--ubatch-size": Refused("--max-num-batched-tokens is the number of tokens computed in one step."),
    "-ctk": Refused("Use --kv-cache-dtype; keys and values have one type."),
    "--cache-type-k": Refused("Use --kv-cache-dtype; keys and values have one type."),
    "-ctv": Refused("Use --kv-cache-dtype; keys and values have one type."),
    "--cache-type-v": Refused("Use --kv-cache-dtype; keys and values have one type."),
    "--mlock": Refused("Weights are not locked in memory: allow it outside, or leave it out."),
    "--no-mmap": Refused("Weights are copied into the form that is computed with; leave it out."),
    "--lora": Refused(_ADAPTERS),
    "--mmproj": Refused(_IMAGES),
    "-n": Refused("Send `max_tokens` with each request, or put max_new_tokens into generation_config.json."),
    "--n-predict": Refused("Send `max_tokens` with each request, or put max_new_tokens into generation_config.json."),
    "--predict": Refused("Send `max_tokens` with each request, or put max_new_tokens into generation_config.json."),
    "-s": Refused("Send `seed` with each request. Without one, each request gets a seed that its answer reports."),
    **dict.fromkeys(("--temp", "--top-k", "--top-p", "--min-p", "--repeat-penalty"), Refused(_PER_REQUEST)),
}
_SHORT_FORMS = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
_SECRETS = ("--hub-token",)
_CONTEXT = ("-c", "--ctx-size")
_SLOTS = ("-np", "--parallel")
_VALUES = {"--dtype": {"half": "float16", "float": "float32"}, "--log-level": {"warn": "warning"}}
"""Other servers' spellings of values that options of the same name take."""


@dataclass(slots=True)
class Translation:
    """A command line with this server's options."""

    arguments: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    """A sentence for each option that was translated or is not needed."""


def translate(arguments: Sequence[str], valued: frozenset[str], switches: frozenset[str]) -> Translation:
    """Translate the options of other servers.

    `valued` and `switches` are the names of this server's options with and without a value. Raises ForeignFlagError.
    """
    found = Translation()
    words = deque(arguments)
    while words:
        word = words.popleft()
        name, equals, value = word.partition("=")
        name = _SHORT_FORMS.get(name, name.replace("_", "-") if name.startswith("--") else name)
        given = value if equals else None
        if word == "--":
            found.arguments += [word, *words]
            break
        if name in valued:
            given = words.popleft() if given is None and words else given
            found.arguments += _pair(name, _VALUES.get(name, {}).get(given or "", given))
        elif name in switches:
            found.arguments.append(name)
        elif name in _CONTEXT:
            _translate_context(name, given or (words.popleft() if words else ""), arguments, found)
        elif name in FOREIGN:
            _translate_one(name, given, words, found)
        else:
            found.arguments.append(word)
    return found


def _translate_one(name: str, value: str | None, words: deque[str], found: Translation) -> None:
    foreign = FOREIGN[name]
    if isinstance(foreign, Refused):
        raise ForeignFlagError(f"{name}: {foreign.advice}")
    if foreign.takes_value and value is None:
        is_bare = isinstance(foreign, Needless) and foreign.may_be_bare and (not words or words[0].startswith("-"))
        if not words and not is_bare:
            raise ForeignFlagError(f"{name} needs a value")
        value = None if is_bare else words.popleft()
    if isinstance(foreign, Translated):
        _translate_value(name, foreign, value, found)
        return
    if value is not None and foreign.only and value not in foreign.only:
        raise ForeignFlagError(f"{name} {value}: {foreign.otherwise}")
    found.notices.append(f"{name} is not needed: {foreign.reason}")


def _translate_value(name: str, foreign: Translated, value: str | None, found: Translation) -> None:
    try:
        values = [None] if value is None else foreign.values(value)
    except ValueError:
        raise ForeignFlagError(f"{name}: cannot read {value!r}; use {foreign.ours} instead") from None
    if foreign.ours == MODEL:
        found.arguments += [one for one in values if one is not None]
        return
    given = [word for one in values for word in _pair(foreign.ours, one)]
    found.arguments += given
    shown = [foreign.ours] if foreign.ours in _SECRETS else given
    found.notices.append(f"{name} is {' '.join(shown)} here.")


def _pair(name: str, value: str | None) -> Sequence[str]:
    return (name,) if value is None else (name, value)


def _translate_context(name: str, value: str, arguments: Sequence[str], found: Translation) -> None:
    """llama.cpp divides its context between slots unless they share it; here each answer has its own length."""
    words = dict(itertools.pairwise(arguments))
    slots = next((words[option] for option in _SLOTS if option in words), "1")
    is_shared = not {"--kv-unified", "-kvu"}.isdisjoint(arguments)
    tokens, parts = whole_number(value), whole_number(slots)
    if tokens is None or not parts:
        raise ForeignFlagError(f"{name}: cannot read {value!r} as a number of tokens; use --max-model-len instead")
    if tokens == 0:
        found.notices.append(f"{name} 0 is not needed: the model's own length is the default.")
        return
    length = value if is_shared else str(max(1, tokens // parts))
    found.arguments += ["--max-model-len", length]
    found.notices.append(f"{name} is --max-model-len {length} here, for prompt and output of one answer.")
