"""An API of a dozen lines: a text is answered in upper case, in a stream word by word."""

from fastapi import APIRouter, Request, Response

from server.api.dialect import AnswerContext, Dialect, GenerationApi
from server.api.endpoint import respond
from server.api.fields.rules import RequestModel
from server.api.services import ServicesDep
from server.errors import ApiError
from server.generation.events import Event, TextDelta
from server.generation.request import GenerationRequest, TextPrompt


class Shout(RequestModel):
    """The request body."""

    model: str
    say: str
    stream: bool | None = None


def intent(body: Shout) -> GenerationRequest:
    prompt = TextPrompt(body.say)
    return GenerationRequest(
        model=body.model, prompts=(prompt,), max_tokens=5, stream=bool(body.stream), paths={"prompt": "say"}
    )


class Loud:
    """The answer."""

    keep_alive = b"..."

    def __init__(self, answering: AnswerContext, options: None) -> None: ...

    def whole(self, choices) -> bytes:
        return choices[0].text.upper().encode()

    def frame(self, event: Event) -> bytes:
        return event.text.upper().encode() + b"\n" if isinstance(event, TextDelta) else b""

    def failure(self, error: ApiError) -> bytes:
        return b"OOPS\n"

    def end(self) -> bytes:
        return b""


router = APIRouter()


@router.post("/shout")
async def shout(request: Request, services: ServicesDep) -> Response:
    return await respond(GenerationApi(Shout, intent, Loud), request, services)


DIALECT = Dialect(
    router,
    errors=lambda error, scope: Response(f"NO: {error.message}", error.status),
    requests={"/shout": Shout},
)
