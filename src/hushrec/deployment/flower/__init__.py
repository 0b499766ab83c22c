"""Flower as the transport of a federation: its processes, the proxy before them, its messages.

The package needs the extra ``flower``; nothing outside of it does.
"""

from importlib.util import find_spec

from hushrec.errors import MissingExtraError

if not all(map(find_spec, ("flwr", "h11", "prometheus_client", "psutil"))):
    raise MissingExtraError("a federation on several machines", "flower")
