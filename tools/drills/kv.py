"""What a server of a model would keep its KV in, as the launcher plans it."""

import os

from config.arch import read_arch
from config.memory_plan import MemoryPlan
from config.resolve import resolve
from config.sources import ConfigError, read_settings
from ipc.control import StartError
from launch import __version__
from launch.machine import look_around
from launch.model_source import locate


def kv_plan(model: str) -> MemoryPlan:
    """The plan of a server with the defaults of this machine; SystemExit that says why there is none."""
    try:
        config = read_settings(["--model", model], os.environ, __version__).config
        path = locate(config.model.model, config.model.revision).path
        return resolve(config, read_arch(path), look_around()).plan
    except (ConfigError, StartError, ValueError, OSError) as error:
        raise SystemExit(f"--model {model}: {error}") from None
