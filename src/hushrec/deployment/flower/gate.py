"""A node's way in to the server: whether it is let in, and why not."""

from __future__ import annotations

from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import (
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from hushrec.deployment.flower.transport import CALL_SECONDS

SHORTEST_HEARTBEAT = float(HEARTBEAT_MIN_INTERVAL)
KEY_HEADER = FLEET_HTTP_PUBLIC_KEY_HEADER.lower().encode()
"""Header of a node's requests with its public key, in base64."""


@dataclass(frozen=True)
class Refused:
    """Why a node did not get in."""

    reason: Literal["unreachable", "certificate", "unknown key", "connected", "clock", "other"]
    detail: str = ""


class Gate:
    """A node's way in to the server, tried before its SuperNode goes through it."""

    def __init__(self, address: str, authority: Path, key: bytes) -> None:
        """``key`` is the node's private key, in OpenSSH format."""
        private = load_ssh_private_key(key, None)
        assert isinstance(private, EllipticCurvePrivateKey), "as provisioned"
        self.public = public_key_to_bytes(private.public_key())
        signed = NodeAuthHttpInterceptor(private, private.public_key())
        version = RuntimeVersionHttpInterceptor(component_name="hushrec")
        self.client = FleetHttpClient.from_server_address(
            address, False, str(authority), [version, signed]
        )
        self.client._client.timeout = httpx.Timeout(CALL_SECONDS)

    def leave(self, node: int) -> None:
        """End the connection of this node, if the server counts one."""
        with suppress(httpx.HTTPError):
            self.client.DeactivateNode(DeactivateNodeRequest(node_id=node))

    def try_key(self) -> int | Refused:
        """Connect, and leave again; return Flower's id of this node, or why it was refused."""
        request = ActivateNodeRequest(public_key=self.public, heartbeat_interval=SHORTEST_HEARTBEAT)
        try:
            node = int(self.client.ActivateNode(request).node_id)
        except httpx.HTTPStatusError as error:
            return _refused(error.response)
        except httpx.TransportError as error:
            wrong = "CERTIFICATE_VERIFY_FAILED" in str(error)
            return Refused("certificate" if wrong else "unreachable", str(error))
        self.leave(node)
        return node


def shown_key(public: bytes) -> bytes:
    """Return a node's public key, which is in OpenSSH format, as the node's requests show it."""
    key = load_ssh_public_key(public)
    assert isinstance(key, EllipticCurvePublicKey), "as provisioned"
    return b64encode(public_key_to_bytes(key))


def _refused(response: httpx.Response) -> Refused:
    if response.status_code == httpx.codes.FORBIDDEN:
        return Refused("unknown key")
    if response.status_code == httpx.codes.PRECONDITION_FAILED:
        return Refused("connected")
    if response.status_code == httpx.codes.UNAUTHORIZED:
        with suppress(TypeError, ValueError):
            theirs = parsedate_to_datetime(response.headers.get("date"))
            return Refused("clock", f"{(datetime.now(UTC) - theirs).total_seconds():+.0f} s")
        return Refused("clock")
    return Refused("other", f"HTTP {response.status_code}")
