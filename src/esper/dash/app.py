"""The dashboard: its web application (a page, and what it shows as JSON), who may read it, and its server."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import secrets
import socket
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from esper.dash.pages import (
    describe_comparison,
    describe_learning,
    describe_look,
    describe_model,
    describe_network,
    describe_population,
    list_events,
    list_runs,
)
from esper.dash.run_view import RunFinder
from esper.dash.stream import StoreFollower, stream_news
from esper.errors import ConfigError, EsperError
from esper.runs.reader import RunReader

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
"""Headers of every response."""
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


STATIC = Path(__file__).parent / "static"
LAST_EVENT_ID = "Last-Event-ID"
LARGEST = 2**53
"""Numbers above it are not whole in a browser."""


def dashboard(finder: RunFinder, access: Access, stopping: Callable[[], bool] = lambda: False) -> ASGIApp:
    """The application; streams end once ``stopping`` says so."""
    app = Starlette(
        routes=[
            Route("/", _page),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/api/{view}", Views(finder, stopping).answer),
        ],
        exception_handlers={EsperError: _answer_error, HTTPException: _answer_not_found, Exception: _answer_defect},
    )
    return SecuredApp(app, access)


class Views:
    """Answers by the last word of the address; the run is given by name."""

    NAMES = ("runs", "compare", "stream", "population", "network", "look", "learning", "model", "events")

    def __init__(self, finder: RunFinder, stopping: Callable[[], bool]) -> None:
        self._finder = finder
        self._stopping = stopping
        self._of_run: dict[str, Callable[[RunReader, Request], Any]] = {
            "population": lambda reader, ask: describe_population(reader, _optional_number(ask, "episode")),
            "network": lambda reader, ask: describe_network(
                reader, _optional_number(ask, "episode"), _number(ask, "environment")
            ),
            "look": lambda reader, ask: describe_look(
                reader, *(_number(ask, name) for name in ("episode", "environment", "step"))
            ),
            "learning": lambda reader, _: describe_learning(reader),
            "model": lambda reader, _: describe_model(reader),
            "events": lambda reader, ask: list_events(
                reader,
                ask.query_params.getlist("type"),
                ask.query_params.get("text", ""),
                _optional_number(ask, "before"),
            ),
        }

    def answer(self, request: Request) -> Response:
        view = request.path_params["view"]
        if view == "runs":
            return _json({"runs": list_runs(self._finder.find()), "places": [str(one) for one in self._finder.places]})
        if view == "compare":
            stores = self._finder.find()
            asked = dict.fromkeys(request.query_params.getlist("run"))
            return _json({"runs": describe_comparison({name: stores.get(name) for name in asked})})
        if view == "stream":
            return self._stream(request)
        if view not in self._of_run:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        with RunReader.open(self._store(request)) as reader:
            return _json(self._of_run[view](reader, request))

    def _store(self, request: Request) -> Path:
        return self._finder.store(request.query_params.get("run", ""))

    def _stream(self, request: Request) -> Response:
        last_id = _read_number(request.headers.get(LAST_EVENT_ID, ""), LAST_EVENT_ID)
        if last_id is None:
            last_id = _optional_number(request, "after")
        types = request.query_params.getlist("type")
        news = stream_news(StoreFollower(self._store(request), last_id or 0), types, self._stopping)
        return StreamingResponse(news, media_type="text/event-stream")


def _number(request: Request, name: str) -> int:
    """A whole number that must be given; ConfigError if it is not one."""
    number = _optional_number(request, name)
    if number is None:
        raise ConfigError(f"`{name}` is missing: give a whole number from 0")
    return number


def _optional_number(request: Request, name: str) -> int | None:
    return _read_number(request.query_params.get(name, ""), name)


def _read_number(text: str, name: str) -> int | None:
    """What a text that is called ``name`` says, or None if it is empty; ConfigError if that is no whole number."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(LARGEST)) and int(text) <= LARGEST):
        raise ConfigError(f"`{name}` is {text[:40]!r}: give a whole number from 0")
    return int(text)


def _page(_: Request) -> Response:
    return FileResponse(STATIC / "index.html")


def _json(value: Any, status: HTTPStatus = HTTPStatus.OK) -> Response:
    # Escapes keep halves of characters apart from the encoding, which has no place for them.
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(text, status, media_type="application/json")


def _answer_error(_: Request, error: Exception) -> Response:
    """What was asked for cannot be, or not be had."""
    status = HTTPStatus.BAD_REQUEST if isinstance(error, ConfigError) else HTTPStatus.NOT_FOUND
    return _json({"error": str(error)}, status)


def _answer_not_found(_: Request, _error: Exception) -> Response:
    return _json({"error": "There is no such page: go to the dashboard's start."}, HTTPStatus.NOT_FOUND)


def _answer_defect(_: Request, _error: Exception) -> Response:
    """A defect: the server's terminal has the traceback."""
    return _json({"error": "The dashboard has failed at this: see its terminal."}, HTTPStatus.INTERNAL_SERVER_ERROR)


SHORTEST_TOKEN = 16
GOODBYE_SECONDS = 2
"""Seconds in which open connections may end when the server stops."""


def create_access(host: str, token: str | None) -> Access:
    """Who may ask: an address that others can reach gets a token if it has none.

    Raises:
        ConfigError: the token is easy to guess, or cannot be part of an address.
    """
    if token is not None and not (len(token) >= SHORTEST_TOKEN and token.replace("-", "").replace("_", "").isalnum()):
        raise ConfigError(
            f"the token must have at least {SHORTEST_TOKEN} letters, digits, `-` or `_`: leave it out for a good one"
        )
    return Access(host, secrets.token_urlsafe() if token is None and not is_loopback(host) else token)


def serve(finder: RunFinder, access: Access, port: int, browser: bool, print_line: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; port 0 is any free one.

    Raises:
        ConfigError: the address or port cannot be had.
    """
    with _open_socket(access.host, port) as listener:
        config = uvicorn.Config(
            dashboard(finder, access, lambda: server.should_exit),
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GOODBYE_SECONDS,
        )
        server = uvicorn.Server(config)
        # Whoever does not read what was sent is cut off at the end, on purpose: no error, and no traceback.
        logging.getLogger("uvicorn.error").addFilter(lambda _: not server.should_exit)
        address = _format_address(access, listener.getsockname()[1])
        print_line(f"dashboard: {address}")
        print_line("Ctrl-C stops it.")
        if browser:
            webbrowser.open(address)
        with suppress(KeyboardInterrupt):  # the usual end
            server.run(sockets=[listener])


def _open_socket(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        # Python adds the address in brackets, which the sentence says already.
        reason = str(error.strerror).partition(" (")[0] if isinstance(error, OSError) else "it is out of range"
        raise ConfigError(
            f"cannot serve on {host}, port {port} ({reason}): give another `--port`, 0 for any, or another `--host`"
        ) from error


def _format_address(access: Access, port: int) -> str:
    host = f"[{access.host}]" if ":" in access.host else access.host
    return f"http://{host}:{port}/" + ("" if access.token is None else f"?token={access.token}")
