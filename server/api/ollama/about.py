"""GET /api/version, /api/tags and /api/ps, POST /api/show: the server and its models for Ollama's clients."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from server import __version__
from server.api.answer_object import AnswerObject, Warnings, doc
from server.api.body_worker import BodyContext
from server.api.dialect import Dialect
from server.api.fields.rules import hint
from server.api.model_services import ModelServices
from server.api.ollama.errors import OllamaErrorBody, error_response
from server.api.ollama.options import NATIVE
from server.api.ollama.schema import NamedFields
from server.api.ollama.served import capabilities, described, find_model, listed_name, meant_name
from server.api.openapi import answers, takes
from server.api.services import ModelsDep, ServicesDep
from server.generation.notices import Notice, as_headers, to_report
from server.http.middleware import sender_of
from server.http.responses import json_response

OLLAMA_VERSION = "0.32.0"
"""The version of Ollama whose API this follows; clients parse it as numbers, and ask for a least one."""
NEVER = "9999-12-31T23:59:59Z"
_DIGEST = "SHA-256 of the model's files; until they are read for the first time, of their names, sizes and times."
_NOT_REPLACED = "The model is shown as it is served."

router = APIRouter(tags=["Ollama"])


class OllamaVersion(AnswerObject):
    """Response schema for GET /api/version."""

    version: Annotated[str, doc("The version of Ollama whose API this follows.")] = OLLAMA_VERSION
    server: Annotated[str, doc("Extension: the server's name and version.")] = f"samewise {__version__}"


class OllamaDetails(AnswerObject):
    """Properties of a model's files."""

    parent_model: Annotated[str, doc("Always empty.")] = ""
    format: Annotated[str, doc("`gguf`, `safetensors` or `unknown`.")]
    family: Annotated[str, doc("The model's architecture, by the name in its files.")]
    families: Annotated[Sequence[str], doc("Same as `family`.")]
    parameter_size: Annotated[str, doc("How many weights the model has, such as `134.52M`.")]
    quantization_level: Annotated[
        str,
        doc(
            "Name of the file's or checkpoint's quantisation, such as `Q4_K_M`; without one, the type of most weights."
        ),
    ]
    context_length: Annotated[
        int | UnsetType,
        doc("Prompt and output together, in tokens. Missing until known: seconds after the start."),
    ]
    embedding_length: Annotated[
        int | UnsetType, doc("Size of a token's hidden state. Missing until the model has been loaded once.")
    ]


class OllamaListed(AnswerObject):
    """A model on this server."""

    name: Annotated[str, doc("The model's name, with the tag `latest` if it has none.")]
    model: Annotated[str, doc("Same as `name`.")]
    modified_at: Annotated[str, doc("When the server started (RFC 3339).")]
    size: Annotated[int, doc("Bytes of the files with weights.")]
    digest: Annotated[str, doc(_DIGEST)]
    details: OllamaDetails
    capabilities: Annotated[
        Sequence[str], doc("What it can do: `completion`, `tools`, `insert`, `thinking`, `vision`, `embedding`.")
    ]


class OllamaTags(AnswerObject):
    """Response schema for GET /api/tags."""

    models: Annotated[Sequence[OllamaListed], doc("The models, loaded or not, once for each of their names.")]


class OllamaRunning(AnswerObject):
    """A loaded model."""

    name: Annotated[str, doc("The model's name, with the tag `latest` if it has none.")]
    model: Annotated[str, doc("Same as `name`.")]
    size: Annotated[int, doc("Bytes of memory reserved for it; with one model, of the files with weights.")]
    digest: Annotated[str, doc(_DIGEST)]
    details: OllamaDetails
    expires_at: Annotated[str, doc("When it is unloaded if no request comes (RFC 3339); the year 9999 if it stays.")]
    size_vram: Annotated[int, doc("The bytes on a GPU.")]
    context_length: Annotated[int, doc("Prompt and output together, in tokens.")]


class OllamaProcesses(AnswerObject):
    """Response schema for GET /api/ps."""

    models: Annotated[Sequence[OllamaRunning], doc("The loaded models.")]


class OllamaShowRequest(NamedFields):
    """Request schema for POST /api/show."""

    verbose: bool | None = hint("Whether to list all tensors and tokens.", "Tensors and tokens are not listed.")
    system: str | None = hint("A system prompt to show.", _NOT_REPLACED)
    template: str | None = hint("A template to show.", _NOT_REPLACED)
    options: dict[str, Any] | None = hint("Parameters to show.", _NOT_REPLACED)


class OllamaShown(AnswerObject):
    """Response schema for POST /api/show."""

    license: Annotated[str, doc("Always empty.")] = ""
    modelfile: Annotated[str, doc("The name and the parameters as a Modelfile.")]
    parameters: Annotated[str, doc("The context and the model's own defaults: a name and a value in each line.")]
    template: Annotated[
        str,
        doc(
            "The chat template in Jinja. If the model fills in the middle, it begins with a comment that has `.Suffix`."
        ),
    ]
    system: Annotated[str, doc("Always empty.")] = ""
    details: OllamaDetails
    model_info: Annotated[
        Mapping[str, Any], doc("`general.architecture`, and `<architecture>.context_length` and others.")
    ]
    capabilities: Annotated[Sequence[str], doc("As in `/api/tags`.")]
    modified_at: Annotated[str, doc("When the server started (RFC 3339).")]
    warnings: Warnings = UNSET


@router.get("/api/version", responses=answers(OllamaVersion))
async def version() -> Response:
    """The version of Ollama whose API this follows."""
    return json_response(OllamaVersion())


@router.get("/api/tags", responses=answers(OllamaTags, 401, error_body=OllamaErrorBody))
async def tags(models: ModelsDep) -> Response:
    """List the models that the key may use, loaded or not, under each of their names."""
    listed: list[OllamaListed] = []
    for served in models:
        files = await _read_files(served)
        listed += [
            OllamaListed(
                name=name,
                model=name,
                modified_at=_started(served),
                size=files.size,
                digest=files.digest,
                details=files.details,
                capabilities=_capabilities(served),
            )
            for name in map(listed_name, served.model.names)
        ]
    return json_response(OllamaTags(models=listed))


@router.get("/api/ps", responses=answers(OllamaProcesses, 401, error_body=OllamaErrorBody))
async def processes(models: ModelsDep) -> Response:
    """List the loaded models."""
    return json_response(OllamaProcesses(models=[await _running(one) for one in models if one.takes_work]))


async def _running(served: ModelServices) -> OllamaRunning:
    files, name = await _read_files(served), listed_name(served.model.name)
    info, status = served.engine.info, served.residence.status
    size = files.size if status.num_bytes is None else status.num_bytes
    expires = NEVER if status.stays_s is None else _written(datetime.now(UTC) + timedelta(seconds=status.stays_s))
    return OllamaRunning(
        name=name,
        model=name,
        size=size,
        digest=files.digest,
        details=files.details,
        expires_at=expires,
        size_vram=0 if info.device == "cpu" else size,
        context_length=info.max_model_len,
    )


@router.post(
    "/api/show",
    responses=answers(OllamaShown, 400, 401, 404, 413, 415, 429, 500, 503, error_body=OllamaErrorBody),
    openapi_extra=takes(OllamaShowRequest),
)
async def show(request: Request, services: ServicesDep, models: ModelsDep) -> Response:
    """Describe a model, loaded or not: its template, its own defaults, its context and what it can do."""
    body = await services.bodies.read_json(request)
    body_worker = next(iter(services.models)).body_worker
    asked, notices = await body_worker.run(read_show, body, None, sender=sender_of(request))
    served = find_model(models, asked)
    length = served.context_length()
    details = (await _read_files(served)).details
    name = meant_name(served.model.names, asked)
    parameters = "\n".join(f"{key:<30} {value}" for key, value in _parameters(served))
    shown = OllamaShown(
        modelfile="\n".join([f"FROM {name}", *(f"PARAMETER {key} {value}" for key, value in _parameters(served))]),
        parameters=parameters,
        template=_template(served),
        details=details,
        model_info=_model_info(served, details, length),
        capabilities=_capabilities(served),
        modified_at=_started(served),
        warnings=notices or UNSET,
    )
    return json_response(shown, as_headers(notices))


def read_show(context: BodyContext, body: bytes) -> tuple[str, Sequence[Notice]]:
    """The name of the model to show, and notices. Raises ApiError."""
    asked = context.validated(OllamaShowRequest, body)
    return asked.named, to_report(asked.ignored(), strict=context.settings.strict)


@dataclass(frozen=True, slots=True)
class _ModelFiles:
    """Facts from the files of the served model."""

    details: OllamaDetails
    size: int
    digest: str


async def _read_files(served: ModelServices) -> _ModelFiles:
    """Describe the model by its files, and by what is known from its engine or its last one."""
    info, length = served.known_info, served.residence.status.max_model_len
    description = await asyncio.to_thread(described, served.model.folder)
    family = description.architecture if description.format == "GGUF" else served.model.model_type
    details = OllamaDetails(
        format=description.format.lower(),
        family=family,
        families=[family],
        parameter_size=_count(description.parameters),
        quantization_level=description.quantization or next(iter(description.types), "unknown"),
        context_length=UNSET if length is None else length,
        embedding_length=UNSET if info is None else info.hidden_size,
    )
    return _ModelFiles(details, description.size, served.fingerprint.digest_now())


def _count(number: int) -> str:
    """A number of weights as Ollama writes it."""
    for unit, size, digits in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
        if number >= size:
            return f"{number / size:.{digits}f}{unit}"
    return str(number)


def _started(served: ModelServices) -> str:
    return _written(datetime.fromtimestamp(served.model.created, UTC))


def _written(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _capabilities(served: ModelServices) -> Sequence[str]:
    return capabilities(served.model, served.tokenizer, takes_images=served.takes_images)


def _parameters(served: ModelServices) -> Iterator[tuple[str, str]]:
    """The context, and the defaults that the model's files set, by Ollama's names."""
    yield "num_ctx", str(served.context_length())
    defaults = served.model.defaults
    for name, native in NATIVE.items():
        if native in defaults.values:
            yield name, f"{defaults.values[native]:g}"
    if defaults.max_tokens is not None:
        yield "num_predict", str(defaults.max_tokens)
    for text in defaults.stop:
        yield "stop", msgspec.json.encode(text).decode()


def _template(served: ModelServices) -> str:
    template = served.tokenizer.chat_template
    source = "" if template is None else template.source
    return source if served.tokenizer.fill_in is None else "{#- This model takes .Suffix: it fills gaps. -#}" + source


def _model_info(served: ModelServices, details: OllamaDetails, length: int) -> Mapping[str, Any]:
    info, kind = served.known_info, details.family
    known = {} if info is None else {"embedding_length": info.hidden_size, "vocab_size": info.vocab_size}
    return {
        "general.architecture": kind,
        "general.basename": served.model.name,
        "general.parameter_count": described(served.model.folder).parameters,
        f"{kind}.context_length": length,
        **{f"{kind}.{name}": value for name, value in known.items()},
    }


DIALECT = Dialect(router, errors=error_response, requests={"/api/show": OllamaShowRequest})
