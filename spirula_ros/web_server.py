"""A viser server that asks who comes in. viser itself has no authentication, answers every host name, moves on to the next port when its own is taken, and opens a
tunnel to the internet when a browser asks for it: here it gets a socket that is bound already, a guard before its request handler, and no tunnel."""
from __future__ import annotations

import hmac
import http
import ipaddress
import socket
import threading
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from .errors import InputError
from .params import WebConfig

VISER = "1.1."   # the versions whose start is known: see _start
INSTALL = "pip install 'viser>=1.1,<1.2'"
TOKEN_CHARACTERS = 12


class Named(NamedTuple):
    """What the user sets these rows of WebConfig by, for remedies."""
    host: str = "web.host"
    port: str = "web.port"
    token: str = "web.token"


class Answer(NamedTuple):
    """What the guard says instead of the page."""
    status: int
    text: str
    headers: dict[str, str] = {}


class Guard:
    """Decides over each request before viser sees it; one connection carries one request, so none slips in behind another.
    Without a token only requests to a loopback name are served (a page elsewhere could make its own name point here), and a websocket must come from our own page."""

    def __init__(self, token: str, port: int, named: Named = Named()):
        self._token, self._cookie, self._named = token, f"spirula_{port}", named

    def refuses(self, path: str, headers) -> Answer | None:
        """headers: of the `websockets` library, or anything with get_all(name). None: let it in."""
        host, origin = (headers.get_all(name) for name in ("Host", "Origin"))
        if len(host) != 1 or len(origin) > 1:
            return Answer(400, "one Host and at most one Origin, please")
        if origin and urlsplit(origin[0]).netloc.lower() != host[0].lower():
            return Answer(403, f"a page of {origin[0]} may not use this viewer")
        if not self._token:
            return None if is_loopback(urlsplit(f"//{host[0]}").hostname or "") else Answer(403, f"this viewer serves localhost alone; set {self._named.token} to serve others")
        if any(self._fits(token) for token in parse_qs(urlsplit(path).query).get("token", [])):
            return Answer(303, "", {"Location": "/", "Set-Cookie": f"{self._cookie}={self._token}; HttpOnly; SameSite=Lax; Path=/"})
        cookies = (cookie.strip().partition("=") for line in headers.get_all("Cookie") for cookie in line.split(";"))
        if any(name == self._cookie and self._fits(value) for name, _, value in cookies):
            return None
        return Answer(401, "this viewer needs its token: open the address that was printed, ending in /?token=..")

    def _fits(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())

    def before(self, process_request):
        """A process_request of `websockets` that asks the guard first."""
        from websockets.datastructures import Headers
        from websockets.http11 import Response

        def asked(connection, request):
            answer = self.refuses(request.path, request.headers)
            if answer is None:
                return process_request(connection, request)
            body = answer.text.encode()
            headers = {**answer.headers, "Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body)), "Cache-Control": "no-store"}
            return Response(answer.status, http.HTTPStatus(answer.status).phrase, Headers(**headers), body)
        return asked


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check(config: WebConfig, named: Named = Named()) -> None:
    """Who may be let in where. Raises InputError."""
    token = config.token
    if not token and not is_loopback(config.host):
        raise InputError(f"{named.host} {config.host}: whoever reaches it could look, save and reset: set {named.token} ({TOKEN_CHARACTERS} characters at least), "
                         f"or keep 127.0.0.1 and come through `ssh -L {config.port}:localhost:{config.port} ROBOT`")
    if token and (len(token) < TOKEN_CHARACTERS or not all(c.isascii() and (c.isalnum() or c in "-_") for c in token)):
        raise InputError(f"{named.token}: {TOKEN_CHARACTERS} or more of A-Z a-z 0-9 - _; `openssl rand -hex 16` makes one")


def open_server(config: WebConfig, label: str, named: Named = Named()) -> tuple[Any, str]:
    """(viser.ViserServer, the address to open). Raises InputError: no viser, a host without a token, a port that is taken."""
    check(config, named)
    viser = _viser()
    listener = _listen(config, named)
    port = listener.getsockname()[1]
    server = _start(viser, listener, Guard(config.token, port, named), label)
    name = "localhost" if is_loopback(config.host) else socket.gethostname() if config.host in ("0.0.0.0", "::") else config.host
    return server, f"http://{f'[{name}]' if ':' in name else name}:{port}/" + (f"?token={config.token}" if config.token else "")


def _viser():
    try:
        import viser
    except ImportError as error:
        raise InputError(f"the viewer needs viser: {INSTALL} (import says: {error})") from None
    if not viser.__version__.startswith(VISER):
        raise InputError(f"the viewer needs viser {VISER}x, whose start it knows how to guard; this is {viser.__version__}: {INSTALL}")
    return viser


def _listen(config: WebConfig, named: Named) -> socket.socket:
    """Raises InputError."""
    try:
        family, *_, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        remedy = f"take another one ({named.port}; 0 = any that is free)" if config.port else "is it an address of this machine?"
        raise InputError(f"web: {config.host} port {config.port}: {error.strerror.split(' (')[0]}: {remedy}") from None


_starting = threading.Lock()


def _start(viser, listener: socket.socket, guard: Guard, label: str):
    """While it starts, viser 1.1 asks `websockets` once for a server; this is where socket and guard come in. If it did not ask, nothing is served."""
    import rich
    import websockets.asyncio.server as websockets_server
    plain, guarded = websockets_server.serve, []

    def serve(handler, _host, _port, *, process_request, **options):
        guarded.append(True)
        return plain(handler, sock=listener, process_request=guard.before(process_request), **options)
    with _starting:
        console, quiet = rich.get_console(), rich.get_console().quiet
        websockets_server.serve, console.quiet = serve, True   # its banner names an address without the token
        try:
            server = viser.ViserServer("127.0.0.1", listener.getsockname()[1], label, verbose=False)
        finally:
            websockets_server.serve, console.quiet = plain, quiet
    if not guarded:
        server.stop()
        listener.close()
        raise InputError(f"viser {viser.__version__} does not let itself be guarded: {INSTALL}")
    server.request_share_url = lambda *_, **__: None   # a tunnel through a server of others, past the guard
    server.gui.configure_theme(dark_mode=True, show_logo=False, show_share_button=False)
    return server


def close_server(server) -> None:
    """Returns when the port is free."""
    import rich
    console, quiet = rich.get_console(), rich.get_console().quiet
    console.quiet = True   # `server stopped` is no result of ours
    try:
        server.stop()
    finally:
        console.quiet = quiet
