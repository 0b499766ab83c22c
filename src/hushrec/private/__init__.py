"""Private parameters: how methods declare them, and how they are kept."""

from hushrec.private.store import WORKSPACE, PrivateStore, StoreConfig, store_bytes

__all__ = ["WORKSPACE", "PrivateStore", "StoreConfig", "store_bytes"]
