"""The entrance to the page: on a server that wants an API key, nothing behind it runs for those who have none."""

import hashlib
import hmac
import secrets
import time
from html import escape
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.page.api import Api, ApiError, UnexpectedAnswerError, can_be_sent
from server.page.security import SecurityHeaders

_HTML = (Path(__file__).parent / "static" / "entrance.html").read_text()
_TICKET = "samewise_page"
_TICKET_S = 12 * 3600


class Entrance:
    """Passes on requests for the page, and asks for a key where the API wants one.

    A key is exchanged for a ticket, a cookie that opens the page and nothing else. The key itself stays in the
    browser's tab, whose script shows it again when the ticket is no longer valid.
    """

    def __init__(self, base_url: str, page: ASGIApp) -> None:
        """`base_url` is where the API is reached, with /v1."""
        self._api = Api(base_url)
        self._page = page
        self._secret = secrets.token_bytes(32)

    async def close(self) -> None:
        await self._api.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for the page."""
        ticket = Request(scope).cookies.get(_TICKET, "")
        problem = None if self._is_valid(ticket) else await self._problem("")
        app = self._page if problem is None else SecurityHeaders(_ask_for_key(problem))
        await app(scope, receive, send)

    async def take_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that brings a key: with a ticket, or with why there is none."""
        key = Request(scope).headers.get("authorization", "").removeprefix("Bearer ")
        problem = await self._problem(key if can_be_sent(key) else "")
        response: Response
        if problem is None:
            response = Response(status_code=204)
            ticket = self._ticket(int(time.time()) + _TICKET_S)
            response.set_cookie(_TICKET, ticket, path=None, httponly=True, samesite="strict")
        else:
            response = JSONResponse({"message": str(problem)})
        await SecurityHeaders(response)(scope, receive, send)

    async def _problem(self, key: str) -> ApiError | None:
        """Why the API does not let this key in; None if it does, or has another problem than the key."""
        try:
            await self._api.models(key)
        except UnexpectedAnswerError:
            return None
        except ApiError as problem:
            return problem if problem.wants_key or problem.status is None else None
        return None

    def _ticket(self, expires: int) -> str:
        return f"{expires}.{hmac.new(self._secret, str(expires).encode(), hashlib.sha256).hexdigest()}"

    def _is_valid(self, ticket: str) -> bool:
        expires = ticket.partition(".")[0]
        if not (ticket.isascii() and expires.isdigit() and len(expires) < 12):
            return False
        return hmac.compare_digest(ticket, self._ticket(int(expires))) and int(expires) > time.time()


def _ask_for_key(problem: ApiError) -> Response:
    """A form, also where the API cannot be reached, since it may want a key."""
    wanted = "key" if problem.wants_key else "nothing"
    html = _HTML.replace("{wanted}", wanted).replace("{reason}", escape(str(problem)))
    return HTMLResponse(html, headers={"cache-control": "no-store"})
