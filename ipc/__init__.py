"""Messages and links between the processes of tokenmill, and its client SDK (the package `tokenmill_client`).

The names of `sdk` can be imported from here. They are loaded when first asked for: the server's own processes share
this package and do without them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sdk import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return import_module(".sdk", __name__).__all__
    if not name.startswith("_"):
        sdk = import_module(".sdk", __name__)
        if name in sdk.__all__:
            return getattr(sdk, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *import_module(".sdk", __name__).__all__]
