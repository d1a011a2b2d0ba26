"""The socket that a server listens on, and its URL."""

# Short: a server listens before it imports its framework.

import errno
import os
import socket


class BindError(Exception):
    """The server cannot listen on its address. The message says why and what to do."""


_BIND_ADVICE = {
    errno.EADDRINUSE: "end the program that uses it, choose another --port, or pick a free one with --port 0",
    errno.EACCES: "this user may not listen on it; choose a --port above 1023",
    errno.EADDRNOTAVAIL: "this machine has no such address; use --host 127.0.0.1, or 0.0.0.0 for all its addresses",
}


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free one. Raises BindError."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family, backlog=2048)
    except socket.gaierror as error:
        advice = "give --host an address or a name of this machine"
        raise BindError(f"cannot listen on {host} port {port}: {error.strerror}; {advice}") from None
    except OSError as error:
        code = error.errno or 0
        advice = f"; {_BIND_ADVICE[code]}" if code in _BIND_ADVICE else ""
        raise BindError(f"cannot listen on {host} port {port}: {os.strerror(code)}{advice}") from None


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """The listener's URL on this machine, without a slash at the end."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{host}:{port}"
