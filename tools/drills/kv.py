"""What a server of a model would be on this machine, as the launcher plans it."""

import os
from pathlib import Path

from config.arch import read_arch
from config.memory_plan import MemoryPlan
from config.resolve import Resolved, resolve
from config.sources import ConfigError, read_settings
from ipc.control import StartError
from launch import __version__
from launch.kernels import find_kernels
from launch.machine import look_around
from launch.model_source import locate


def resolved(model: str, *flags: str) -> tuple[Path, Resolved]:
    """Where the model is, and the settings and plan of its server with these flags; SystemExit that says why not."""
    try:
        config = read_settings(["--model", model, *flags], os.environ, __version__).config
        path = locate(config.model.model, config.model.revision).path
        return path, resolve(config, read_arch(path), find_kernels(config, look_around(), print))
    except (ConfigError, StartError) as error:  # which name the flag themselves
        raise SystemExit(f"error: {error}") from None
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: --model {model}: {error}") from None


def kv_plan(model: str) -> MemoryPlan:
    """The plan of a server with the defaults of this machine; SystemExit that says why there is none."""
    return resolved(model)[1].plan
