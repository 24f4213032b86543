"""Requests of the tools over the standard library's HTTP: to this machine itself never through a proxy."""

from http.client import HTTPResponse
from ipaddress import ip_address
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener


def open_url(request: Request, timeout: float) -> HTTPResponse:
    """The answer, within `timeout` seconds; raises as `urllib.request.urlopen` does.

    Other machines are asked through what `http_proxy` and `https_proxy` name, unless `no_proxy` names them. A proxy
    that is asked for a loopback address would look on its own machine.
    """
    proxies = [ProxyHandler({})] if _is_here(request.full_url) else []
    response: HTTPResponse = build_opener(*proxies).open(request, timeout=timeout)
    return response


def _is_here(url: str) -> bool:
    host = (urlsplit(url).hostname or "").lower().rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified  # the latter, too, is a connection to oneself
