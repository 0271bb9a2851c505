"""Serving the dashboard until somebody stops it."""

from __future__ import annotations

import logging
import secrets
import socket
import webbrowser
from collections.abc import Callable
from contextlib import suppress

import uvicorn

from esper.dash.app import dashboard
from esper.dash.runs import RunFinder
from esper.dash.security import Access, is_loopback
from esper.errors import ConfigError

SHORTEST_TOKEN = 16
GOODBYE_SECONDS = 2
"""That open connections get to end in."""


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


def serve(finder: RunFinder, access: Access, port: int, browser: bool, say: Callable[[str], None]) -> None:
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
        say(f"dashboard: {address}")
        say("Ctrl-C stops it.")
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
