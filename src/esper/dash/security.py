"""Who may ask the dashboard, and what browsers may do with its answers."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from dataclasses import dataclass
from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
"""Of every response."""
METHODS = ("GET", "HEAD")
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Access:
    """Who may ask; `host` is the address that is served, `token` the secret that is demanded, if any."""

    host: str
    token: str | None = None

    @property
    def local(self) -> bool:
        """Whether only programs of this machine can ask."""
        return is_loopback(self.host)

    def refusal(self, request: Request) -> Response | None:
        """What to answer instead, or None where the request is fine."""
        if request.method not in METHODS:
            headers = {"allow": ", ".join(METHODS)}
            return _refuse(HTTPStatus.METHOD_NOT_ALLOWED, "The dashboard only shows: use GET.", headers)
        if not self._knows(request.headers.get("host", "")):
            return _refuse(HTTPStatus.MISDIRECTED_REQUEST, "This address is not the dashboard's: use the one it said.")
        return None if self.token is None else self._without_token(request, self.token)

    def _knows(self, header: str) -> bool:
        """Whether a Host header is one of ours: a foreign page that resolves its own name to us is kept out."""
        name = _host_name(header)
        if name in LOOPBACK_NAMES:
            return True
        return not self.local and (name in (self.host, socket.gethostname().lower()) or _is_address(name))

    def _without_token(self, request: Request, token: str) -> Response | None:
        cookie = f"esper-dash-{request.url.port or 80}"  # browsers share cookies between ports
        if _same(request.cookies.get(cookie, ""), token):
            return None
        if not _same(request.query_params.get("token", ""), token):
            return _refuse(HTTPStatus.FORBIDDEN, "A token is needed: open the address that `esper dash` said.")
        # The token leaves the address bar and the history at once.
        response = RedirectResponse("/", HTTPStatus.SEE_OTHER)
        response.set_cookie(cookie, token, httponly=True, samesite="strict")
        return response


class SecuredApp:
    """Puts `Access` before an app, and `HEADERS` on all that leaves it."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self._access.refusal(Request(scope))
        await (refusal or self._app)(scope, receive, send_secured)


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own, which no other one can reach."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _host_name(header: str) -> str:
    """Without the port, and without the brackets of IPv6."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())


def _refuse(status: HTTPStatus, sentence: str, headers: dict[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{sentence}\n", status, headers)
