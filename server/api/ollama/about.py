"""GET /api/version, /api/tags and /api/ps, POST /api/show: the server and its model for Ollama's clients."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Self

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET
from pydantic import Field, model_validator

from server import __version__
from server.api.answer_object import AnswerObject, Warnings, doc
from server.api.body_worker import BodyContext
from server.api.dialect import Dialect
from server.api.endpoint import from_body
from server.api.fields.rules import RequestModel, hint, problem, related
from server.api.model_services import ModelServices
from server.api.ollama.errors import OllamaErrorBody, error_response
from server.api.ollama.options import NATIVE
from server.api.ollama.schema import MODEL
from server.api.ollama.served import capabilities, described, listed_name, served_name
from server.api.openapi import answers, takes
from server.api.services import ServicesDep
from server.generation.notices import Notice, as_headers, to_report
from server.http.responses import json_response

OLLAMA_VERSION = "0.32.0"
"""The version of Ollama whose API this follows; clients parse it as numbers, and ask for a least one."""
NEVER = "9999-12-31T23:59:59Z"
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
    family: Annotated[str, doc("The model's architecture.")]
    families: Annotated[Sequence[str], doc("Same as `family`.")]
    parameter_size: Annotated[str, doc("How many weights the model has, such as `134.52M`.")]
    quantization_level: Annotated[str, doc("Type in which most weights are stored.")]
    context_length: Annotated[int, doc("Prompt and output together, in tokens.")]
    embedding_length: Annotated[int, doc("Size of a token's hidden state.")]


class OllamaListed(AnswerObject):
    """A model on this server."""

    name: Annotated[str, doc("The model's name, with the tag `latest` if it has none.")]
    model: Annotated[str, doc("Same as `name`.")]
    modified_at: Annotated[str, doc("When the server started (RFC 3339).")]
    size: Annotated[int, doc("Bytes of the files with weights.")]
    digest: Annotated[str, doc("SHA-256 of the model's files.")]
    details: OllamaDetails
    capabilities: Annotated[
        Sequence[str], doc("What it can do: `completion`, `tools`, `insert`, `thinking`, `vision`, `embedding`.")
    ]


class OllamaTags(AnswerObject):
    """Response schema for GET /api/tags."""

    models: Annotated[Sequence[OllamaListed], doc("The served model, once for each of its names.")]


class OllamaRunning(AnswerObject):
    """A loaded model."""

    name: Annotated[str, doc("The model's name, with the tag `latest` if it has none.")]
    model: Annotated[str, doc("Same as `name`.")]
    size: Annotated[int, doc("Bytes of the files with weights.")]
    digest: Annotated[str, doc("SHA-256 of the model's files.")]
    details: OllamaDetails
    expires_at: Annotated[str, doc("Always far away: the model stays loaded.")] = NEVER
    size_vram: Annotated[int, doc("The bytes on a GPU.")]
    context_length: Annotated[int, doc("Prompt and output together, in tokens.")]


class OllamaProcesses(AnswerObject):
    """Response schema for GET /api/ps."""

    models: Annotated[Sequence[OllamaRunning], doc("The served model.")]


class OllamaShowRequest(RequestModel):
    """Request schema for POST /api/show."""

    model: str | None = Field(None, description=f"{MODEL} Either this or `name` is required.")
    name: str | None = Field(None, description="Older name for `model`.", json_schema_extra=related(excludes=["model"]))
    verbose: bool | None = hint("Whether to list all tensors and tokens.", "Tensors and tokens are not listed.")
    system: str | None = hint("A system prompt to show.", _NOT_REPLACED)
    template: str | None = hint("A template to show.", _NOT_REPLACED)
    options: dict[str, Any] | None = hint("Parameters to show.", _NOT_REPLACED)

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if self.model is None and self.name is None:
            raise problem("missing_required_parameter", "Missing required parameter: 'model'.", "model")
        return self


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


@router.get("/api/tags", responses=answers(OllamaTags, 401, 503, error_body=OllamaErrorBody))
async def tags(services: ServicesDep) -> Response:
    """List the models: the served one, under each of its names."""
    served = services.models.default
    files = await _read_files(served)
    can = capabilities(served.model, served.tokenizer, takes_images=served.planner().takes_images)
    models = [
        OllamaListed(
            name=name,
            model=name,
            modified_at=_started(served),
            size=files.size,
            digest=files.digest,
            details=files.details,
            capabilities=can,
        )
        for name in map(listed_name, served.model.names)
    ]
    return json_response(OllamaTags(models=models))


@router.get("/api/ps", responses=answers(OllamaProcesses, 401, 503, error_body=OllamaErrorBody))
async def processes(services: ServicesDep) -> Response:
    """List the loaded models: the served one."""
    served = services.models.default
    files, name = await _read_files(served), listed_name(served.model.name)
    info = served.info()
    running = OllamaRunning(
        name=name,
        model=name,
        size=files.size,
        digest=files.digest,
        details=files.details,
        size_vram=0 if info.device == "cpu" else files.size,
        context_length=info.max_model_len,
    )
    return json_response(OllamaProcesses(models=[running]))


@router.post(
    "/api/show",
    responses=answers(OllamaShown, 400, 401, 404, 413, 415, 429, 500, 503, error_body=OllamaErrorBody),
    openapi_extra=takes(OllamaShowRequest),
)
async def show(request: Request, services: ServicesDep) -> Response:
    """Describe a model: its template, its own defaults, its context and what it can do."""
    name, notices = await from_body(request, services, read_show)
    served = services.models.find(name)
    details = (await _read_files(served)).details
    parameters = "\n".join(f"{key:<30} {value}" for key, value in _parameters(served))
    shown = OllamaShown(
        modelfile="\n".join([f"FROM {name}", *(f"PARAMETER {key} {value}" for key, value in _parameters(served))]),
        parameters=parameters,
        template=_template(served),
        details=details,
        model_info=_model_info(served, details),
        capabilities=capabilities(served.model, served.tokenizer, takes_images=served.planner().takes_images),
        modified_at=_started(served),
        warnings=notices or UNSET,
    )
    return json_response(shown, as_headers(notices))


def read_show(context: BodyContext, body: bytes) -> tuple[str, Sequence[Notice]]:
    """The served name of the model to show, and notices. Raises ApiError."""
    asked = context.validated(OllamaShowRequest, body)
    name = served_name(context.model, asked.model or asked.name or "")
    return name, to_report(asked.ignored(), strict=context.settings.strict)


@dataclass(frozen=True, slots=True)
class _ModelFiles:
    """Facts from the files of the served model."""

    details: OllamaDetails
    size: int
    digest: str


async def _read_files(served: ModelServices) -> _ModelFiles:
    """Describe the model's files. Raises UnavailableError while the engine accepts no work."""
    info, folder = served.info(), served.model.folder
    description = await asyncio.to_thread(described, folder)
    details = OllamaDetails(
        format=description.format.lower(),
        family=served.model.model_type,
        families=[served.model.model_type],
        parameter_size=_count(description.parameters),
        quantization_level=next(iter(description.types), "unknown"),
        context_length=info.max_model_len,
        embedding_length=info.hidden_size,
    )
    return _ModelFiles(details, description.size, await served.fingerprint.of_files())


def _count(number: int) -> str:
    """A number of weights as Ollama writes it."""
    for unit, size, digits in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
        if number >= size:
            return f"{number / size:.{digits}f}{unit}"
    return str(number)


def _started(served: ModelServices) -> str:
    return datetime.fromtimestamp(served.model.created, UTC).isoformat().replace("+00:00", "Z")


def _parameters(served: ModelServices) -> Iterator[tuple[str, str]]:
    """The context, and the defaults that the model's files set, by Ollama's names."""
    yield "num_ctx", str(served.info().max_model_len)
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


def _model_info(served: ModelServices, details: OllamaDetails) -> Mapping[str, Any]:
    info, kind = served.info(), details.family
    return {
        "general.architecture": kind,
        "general.basename": served.model.name,
        "general.parameter_count": described(served.model.folder).parameters,
        f"{kind}.context_length": info.max_model_len,
        f"{kind}.embedding_length": info.hidden_size,
        f"{kind}.vocab_size": info.vocab_size,
    }


DIALECT = Dialect(router, errors=error_response, requests={"/api/show": OllamaShowRequest})
