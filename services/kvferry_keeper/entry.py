"""The entry point `kvferry.keepers`."""

from kvferry_keeper.actor import KeeperActor
from kvferry_keeper.store.keyring import load_keyring

__all__ = ["KeeperActor", "load_keyring"]
