"""The TCP socket that clients connect to. It belongs to the launcher, so that it outlives every frontend."""

import errno
import socket

from ipc.control import StartError

_BACKLOG = 1024


def open_listener(host: str, port: int) -> socket.socket:
    """A listening socket; StartError naming --host or --port when there can be none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else "not a host name"
        raise StartError(f"--host {host}: {reason}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartError(
                f"--port {port}: already in use on {host}. Choose another, or --port 0 for any free one."
            ) from None
        if error.errno == errno.EACCES:
            raise StartError(
                f"--port {port}: this user may not listen on it; ports from 1024 on need no rights."
            ) from None
        raise StartError(f"--host {host}: cannot listen there: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket, scheme: str = "http") -> str:
    """SCHEME://HOST:PORT of the socket."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def reachable(address: str) -> str:
    """The address to try from this machine: loopback, where it listens everywhere."""
    return address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def free_loopback_port() -> int:
    """A TCP port on loopback that nothing uses right now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
