"""Routers that map ports: one in this process, and one that speaks UPnP IGD over HTTP on loopback."""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from molink.peer.reach.port_mapping import GatewayError

SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
_DEVICE = "urn:schemas-upnp-org:device:"
_ADDED = ("NewExternalPort", "NewInternalClient", "NewInternalPort", "NewProtocol", "NewLeaseDuration")


@dataclass
class HomeRouter:
    """A gateway in this process. `mapped`: outer ports, with the inner one and the lease."""

    host: str = "203.0.113.7"
    taken: set[int] = field(default_factory=set)
    mapped: dict[int, tuple[int, int]] = field(default_factory=dict)
    refuses: bool = False
    most: int = 100
    before_found: Callable[[], object] = lambda: None

    def find(self) -> Self:
        self.before_found()
        return self

    def outer_host(self) -> str:
        return self.host

    def map_port(self, outer_port: int, inner_port: int, lease_s: int) -> None:
        full = outer_port not in self.mapped and len(self.mapped) >= self.most
        if self.refuses or full or outer_port in self.taken:
            raise GatewayError("the router refuses", "forward the ports by hand")
        self.mapped[outer_port] = inner_port, lease_s

    def unmap_port(self, outer_port: int) -> None:
        del self.mapped[outer_port]


class UpnpRouter:
    """An IGD on loopback, without the search by multicast. `mapped`: outer ports, with what was asked for them."""

    def __init__(self, host: str = "203.0.113.7") -> None:
        self.host = host
        self.taken: set[int] = set()
        self.mapped: dict[int, tuple[str, int, str, int]] = {}
        self.broken = False
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, "what is this" if router.broken else _description())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                action = self.headers["SOAPAction"].strip('"').partition("#")[2]
                self._answer(*router.act(action, dict(re.findall(r"<(New\w+)>([^<]*)<", body))))

            def log_message(self, *_: object) -> None:
                """Says nothing."""

            def _answer(self, code: int, body: str) -> None:
                self.send_response(code)
                self.send_header("Content-Type", 'text/xml; charset="utf-8"')
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.described_at = f"http://127.0.0.1:{self._server.server_port}/description.xml"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def act(self, action: str, given: dict[str, str]) -> tuple[int, str]:
        """The status and the body of what is answered."""
        if self.broken:
            return 200, "what is this"
        if action == "GetExternalIPAddress":
            return _said(action, f"<NewExternalIPAddress>{self.host}</NewExternalIPAddress>")
        port = int(given.get("NewExternalPort", "0"))
        if action == "AddPortMapping":
            if port in self.taken:
                return _failed(718, "ConflictInMappingEntry")
            _, client, inner, protocol, lease = (given[name] for name in _ADDED)
            self.mapped[port] = client, int(inner), protocol, int(lease)
            return _said(action)
        if action == "DeletePortMapping" and port in self.mapped:
            del self.mapped[port]
            return _said(action)
        return _failed(714, "NoSuchEntryInArray")


def _description() -> str:
    service = (
        f"<service><serviceType>{SERVICE}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>"
        "<controlURL>/control</controlURL><eventSubURL>/events</eventSubURL><SCPDURL>/scpd.xml</SCPDURL></service>"
    )
    content = f"<serviceList>{service}</serviceList>"
    for kind in ("WANConnectionDevice:1", "WANDevice:1", "InternetGatewayDevice:1"):
        device = f"<device><deviceType>{_DEVICE}{kind}</deviceType>{content}</device>"
        content = f"<deviceList>{device}</deviceList>"
    return f'<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0">{device}</root>'


def _enveloped(body: str) -> str:
    return (
        '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/">'
        f"<s:Body>{body}</s:Body></s:Envelope>"
    )


def _said(action: str, values: str = "") -> tuple[int, str]:
    return 200, _enveloped(f'<u:{action}Response xmlns:u="{SERVICE}">{values}</u:{action}Response>')


def _failed(code: int, why: str) -> tuple[int, str]:
    error = f"<errorCode>{code}</errorCode><errorDescription>{why}</errorDescription>"
    return 500, _enveloped(f"<s:Fault><detail><UPnPError>{error}</UPnPError></detail></s:Fault>")
