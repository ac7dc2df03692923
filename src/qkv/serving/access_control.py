"""Access control, which restricts the server to requests from this machine with the expected host and a valid token."""

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


def json_error_response(status: int, message: str) -> Response:
    body = json.dumps({"error": message}).encode()
    return Response(body, status, media_type="application/json")


class SecurityMiddleware:
    """ASGI middleware that checks the host, origin and token of every request and adds security headers.

    The middleware wraps the whole application so that no route can be left unprotected.
    """

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

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        response = self._intercept_request(scope)
        await (self._app if response is None else response)(scope, receive, send_with_headers)

    def _intercept_request(self, scope: Scope) -> Response | None:
        """Return the response to a request that must not reach the application, or `None` if the request is allowed."""
        headers = Headers(scope=scope)
        if headers.get("host") not in self._hosts:
            # Prevents DNS rebinding attacks, in which an attacker's domain name resolves to this machine.
            message = f"Host must be 127.0.0.1:{self._port}, got {headers.get('host')!r}"
            return json_error_response(403, message)
        origin = headers.get("origin")
        if origin is not None and origin.removeprefix("http://") not in self._hosts:
            return json_error_response(403, f"requests from the origin {origin!r} are not allowed")
        query_tokens = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        if scope["path"] == "/" and query_tokens:
            return self._log_in(query_tokens[0])
        tokens = [headers.get(TOKEN_HEADER), self._read_cookie(headers.getlist("cookie"))]
        if any(token is not None and self._is_valid_token(token) for token in tokens):
            return None
        return json_error_response(
            401, "the access token is missing or wrong; open the address printed by `qkv explore`"
        )

    def _log_in(self, token: str) -> Response:
        """Store a valid token in a cookie and redirect to the page."""
        if not self._is_valid_token(token):
            message = "the access token is wrong; open the address most recently printed by `qkv explore`"
            return json_error_response(401, message)
        response = RedirectResponse("/", 303)
        # With samesite="strict", a link opened from another page, such as a web terminal, would not send the cookie.
        response.set_cookie(self._cookie_name, token, httponly=True, samesite="lax", path="/")
        return response

    def _is_valid_token(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self._token.encode())

    @property
    def _cookie_name(self) -> str:
        # Browsers share cookies between ports, so two servers need different cookie names.
        return f"qkv_token_{self._port}"

    def _read_cookie(self, headers: Iterable[str]) -> str | None:
        for header in headers:
            try:
                cookie = SimpleCookie(header).get(self._cookie_name)
            except CookieError:
                continue
            if cookie is not None:
                return cookie.value
        return None
