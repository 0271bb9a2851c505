"""The dashboard: its web application (a page, and its data as JSON), access control, and the server."""

import hmac
import ipaddress
import json
import logging
import secrets
import socket
import webbrowser
from collections.abc import Callable, Mapping
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
    describe_compared,
    describe_interactions,
    describe_learning,
    describe_look,
    describe_model,
    describe_network,
    describe_population,
    describe_run,
    list_events,
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
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Access:
    """Who may read the dashboard: `host` is the served address, `token` the secret that requests must have, if any."""

    host: str
    token: str | None = None

    def check(self, request: Request) -> Response | None:
        """The response that refuses a request or takes over its token; None if the request may pass."""
        if request.method not in ("GET", "HEAD"):
            headers = {"allow": "GET, HEAD"}
            return _refuse(HTTPStatus.METHOD_NOT_ALLOWED, "The dashboard is read-only: use GET.", headers)

        # A Host header of another name: a foreign page may have made its own name resolve to this machine.
        # It may have a port, and brackets around an address of IPv6.
        header = request.headers.get("host", "").strip().lower()
        name = header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]
        is_known = name in LOOPBACK_NAMES or (
            not is_loopback(self.host) and (name in (self.host, socket.gethostname().lower()) or _is_address(name))
        )
        if not is_known:
            message = (
                "Unknown host name: open the address that `esper dash` printed, from another machine through `ssh -L "
                "PORT:localhost:PORT`, or serve on `--host 0.0.0.0`."
            )
            return _refuse(HTTPStatus.MISDIRECTED_REQUEST, message)

        # The token comes once in the address, and from then on in a cookie. Browsers share cookies between ports.
        cookie = f"esper-dash-{request.url.port or 80}"
        if self.token is None or _is_equal(request.cookies.get(cookie, ""), self.token):
            return None
        if not _is_equal(request.query_params.get("token", ""), self.token):
            return _refuse(HTTPStatus.FORBIDDEN, "A token is needed: open the address that `esper dash` printed.")
        # Redirected at once, so that the token leaves the address bar and the history. The address is relative, since a
        # proxy may serve the page behind a prefix.
        response = RedirectResponse("../" * (request.url.path.count("/") - 1) or "./", HTTPStatus.SEE_OTHER)
        response.set_cookie(cookie, self.token, httponly=True, samesite="strict")
        return response

    def protect(self, app: ASGIApp) -> ASGIApp:
        """The app for requests that pass; all responses have `HEADERS`."""

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_secured(message: Message) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message).update(HEADERS)
                await send(message)

            refusal = self.check(Request(scope)) if scope["type"] == "http" else None
            await (refusal or app)(scope, receive, send_secured)

        return respond


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_equal(text: str, secret: str) -> bool:
    """Compare a text with a secret in a time that does not depend on where they differ."""
    return hmac.compare_digest(text.encode("utf-8", "replace"), secret.encode())


def _refuse(status: HTTPStatus, sentence: str, headers: dict[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{sentence}\n", status, headers)


STATIC = Path(__file__).parent / "static"
LAST_EVENT_ID = "Last-Event-ID"
LARGEST = 2**53
"""The largest integer that browsers represent exactly."""


class Query:
    """The parameters of a request. ConfigError if a number is not one."""

    def __init__(self, request: Request) -> None:
        self.text = request.query_params.get
        self.list = request.query_params.getlist

    def number(self, name: str) -> int | None:
        """A whole number, or None if it is missing."""
        return read_number(self.text(name, ""), name)

    def required(self, name: str) -> int:
        """A whole number that must be given."""
        number = self.number(name)
        if number is None:
            raise ConfigError(f"`{name}` is missing: give a whole number from 0")
        return number


def read_number(text: str, name: str) -> int | None:
    """The number of parameter ``name``, or None if it is empty; ConfigError if it is not a whole number."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(LARGEST)) and int(text) <= LARGEST):
        raise ConfigError(f"`{name}` is {text[:40]!r}: give a whole number from 0")
    return int(text)


PAGES: Mapping[str, Callable[[RunReader, Query], Any]] = {
    "population": lambda reader, query: describe_population(reader, query.number("episode")),
    "network": lambda reader, query: describe_network(reader, query.number("episode"), query.required("environment")),
    "look": lambda reader, query: describe_look(
        reader, query.required("episode"), query.required("environment"), query.required("step")
    ),
    "interactions": lambda reader, query: describe_interactions(reader, query.number("episode")),
    "learning": lambda reader, _: describe_learning(reader),
    "model": lambda reader, _: describe_model(reader),
    "events": lambda reader, query: list_events(
        reader, query.list("type"), query.text("text", ""), query.number("before"), query.text("important") == "1"
    ),
}
"""The data of one run's pages, as plain JSON values."""


def dashboard(finder: RunFinder, access: Access, stopping: Callable[[], bool] = lambda: False) -> ASGIApp:
    """The web application; its streams end once ``stopping`` returns True."""

    def respond(request: Request) -> Response:
        """JSON, or a stream of events, by the last part of the path; `run` is a run's name."""
        page, query = request.path_params["page"], Query(request)
        if page == "runs":
            runs = [describe_run(name, store) for name, store in finder.find().items()]
            return _json({"runs": runs, "places": [str(place) for place in finder.places]})
        if page == "compare":
            stores, names = finder.find(), dict.fromkeys(query.list("run"))
            return _json({"runs": [describe_compared(name, stores.get(name)) for name in names]})
        if page != "stream" and page not in PAGES:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        store = finder.store(query.text("run", ""))
        if page == "stream":
            after = read_number(request.headers.get(LAST_EVENT_ID, ""), LAST_EVENT_ID)
            after = query.number("after") if after is None else after
            news = stream_news(StoreFollower(store, after or 0), query.list("type"), stopping)
            return StreamingResponse(news, media_type="text/event-stream")
        with RunReader.open(store) as reader:
            return _json(PAGES[page](reader, query))

    def send_page(_: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    app = Starlette(
        routes=[
            Route("/", send_page),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/api/{page}", respond),
        ],
        exception_handlers=dict.fromkeys((EsperError, HTTPException, Exception), _describe_failure),
    )
    return access.protect(app)


def _json(value: Any, status: HTTPStatus = HTTPStatus.OK) -> Response:
    # Written with escapes, since UTF-8 cannot encode half a character, which a run's texts may contain.
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(text, status, media_type="application/json")


def _describe_failure(_: Request, error: Exception) -> Response:
    """Respond to a wrong request, or to one whose run cannot be read; a defect's traceback is in the terminal."""
    match error:
        case EsperError():
            status = HTTPStatus.BAD_REQUEST if isinstance(error, ConfigError) else HTTPStatus.NOT_FOUND
            sentence = str(error)
        case HTTPException():
            status, sentence = HTTPStatus.NOT_FOUND, "There is no such page: open the dashboard's start page."
        case _:
            status, sentence = HTTPStatus.INTERNAL_SERVER_ERROR, "The dashboard failed: see its terminal."
    return _json({"error": sentence}, status)


SHORTEST_TOKEN = 16
SHUTDOWN_SECONDS = 2
"""Seconds for open connections to end when the server stops."""


def create_access(host: str, token: str | None) -> Access:
    """Access to an address, with a new token if other machines can reach it and ``token`` is None."""
    if token is not None and not (len(token) >= SHORTEST_TOKEN and token.replace("-", "").replace("_", "").isalnum()):
        raise ConfigError(
            f"the token must have at least {SHORTEST_TOKEN} letters, digits, `-` or `_`: leave it out for a good one"
        )
    return Access(host, secrets.token_urlsafe() if token is None and not is_loopback(host) else token)


def serve(finder: RunFinder, access: Access, port: int, browser: bool, print_line: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; port 0 stands for any free port."""
    # The socket first: only it has the port that the system chose for port 0.
    with _open_socket(access.host, port) as listener:
        config = uvicorn.Config(
            dashboard(finder, access, lambda: server.should_exit),
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        server = uvicorn.Server(config)
        # At the end, connections that do not read are cut off on purpose: that is no error to print.
        logging.getLogger("uvicorn.error").addFilter(lambda _: not server.should_exit)
        host = f"[{access.host}]" if ":" in access.host else access.host
        token = "" if access.token is None else f"?token={access.token}"
        address = f"http://{host}:{listener.getsockname()[1]}/{token}"
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
        # Python adds the address in brackets, which the message has already.
        reason = str(error.strerror).partition(" (")[0] if isinstance(error, OSError) else "it is out of range"
        raise ConfigError(
            f"cannot serve on {host}, port {port} ({reason}): give another `--port`, 0 for any, or another `--host`"
        ) from error
