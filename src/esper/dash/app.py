"""The dashboard's web application: a page, and what it shows as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from esper.dash.answers import (
    describe_comparison,
    describe_learning,
    describe_look,
    describe_model,
    describe_network,
    describe_population,
    list_events,
    list_runs,
)
from esper.dash.runs import RunFinder
from esper.dash.security import Access, SecuredApp
from esper.dash.stream import StoreFollower, stream_news
from esper.errors import ConfigError, EsperError
from esper.runs.reader import RunReader

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
        known = _read_number(request.headers.get(LAST_EVENT_ID, ""), LAST_EVENT_ID)
        if known is None:
            known = _optional_number(request, "after")
        types = request.query_params.getlist("type")
        news = stream_news(StoreFollower(self._store(request), known or 0), types, self._stopping)
        return StreamingResponse(news, media_type="text/event-stream")


def _number(request: Request, name: str) -> int:
    """A whole number that must be given; ConfigError if it is not one."""
    found = _optional_number(request, name)
    if found is None:
        raise ConfigError(f"`{name}` is missing: give a whole number from 0")
    return found


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
