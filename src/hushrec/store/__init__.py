"""Private parameters: how methods declare them, and how they are kept."""

from hushrec.store.private_store import WORKSPACE, PrivateStore, StoreConfig, store_bytes

__all__ = ["WORKSPACE", "PrivateStore", "StoreConfig", "store_bytes"]
