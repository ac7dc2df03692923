"""Who may ask: only this machine, by its own address, with the token."""

import json
import secrets
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_HEADER = "x-qkv-token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def refused(status: int, line: str) -> Response:
    body = json.dumps({"error": line}).encode()
    return Response(body, status, media_type="application/json")


class Guard:
    """Stands before the whole application, so that no route can be forgotten."""

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._port = port
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._stopped(scope)
        await (self._app if answer is None else answer)(scope, receive, send_guarded)

    def _stopped(self, scope: Scope) -> Response | None:
        """Why this goes no further; None: it may."""
        headers = Headers(scope=scope)
        if headers.get("host") not in self._hosts:
            # A name of somebody else's that points at this machine (DNS rebinding) comes to nothing here.
            return refused(403, f"this server answers as 127.0.0.1:{self._port}, not as {headers.get('host')!r}")
        origin = headers.get("origin")
        if origin is not None and origin.removeprefix("http://") not in self._hosts:
            return refused(403, f"a page of {origin!r} may not ask this server")
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        if scope["path"] == "/" and asked:
            return self._let_in(asked[0])
        given = [headers.get(TOKEN_HEADER), self._cookie(headers.getlist("cookie"))]
        if any(one is not None and self._is_token(one) for one in given):
            return None
        return refused(401, "the token is missing or wrong: open the address that `qkv explore` printed")

    def _let_in(self, token: str) -> Response:
        if not self._is_token(token):
            return refused(401, "the token is wrong: open the address that `qkv explore` printed last")
        answer = RedirectResponse("/", 303)
        # Not strict: whoever follows the link from a page, such as a terminal in the browser, would come without it.
        answer.set_cookie(self._cookie_name, token, httponly=True, samesite="lax", path="/")
        return answer

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())

    @property
    def _cookie_name(self) -> str:
        # Cookies are of a host, whatever the port: two servers must not take each other's.
        return f"qkv_token_{self._port}"

    def _cookie(self, headers: Iterable[str]) -> str | None:
        for header in headers:
            try:
                found = SimpleCookie(header).get(self._cookie_name)
            except CookieError:
                continue
            if found is not None:
                return found.value
        return None
