"""What the commands around GPU kernels look at before they begin."""

import argparse
import tempfile
from collections.abc import Sequence

from config.sources import ConfigError
from kernels.gpu.launch import cache_folder
from tools.gpu_kernels.case import Case
from tools.gpu_kernels.registry import load_cases


def chosen_cases(parser: argparse.ArgumentParser, modules: Sequence[str], only: str) -> list[Case]:
    """The cases of `modules` that --only asks for; an error, which names the kernels, where there are none."""
    cases = load_cases(modules, only)
    if not cases:
        kernels = ", ".join(dict.fromkeys(case.kernel for case in load_cases(modules)))
        parser.error(f"--only {only}: no case has such a label, KERNEL/NAME; kernels: {kernels}")
    return cases


def check_cache() -> None:
    """ConfigError where Triton can't keep what it compiles; without its folder, nothing is compiled at all."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"compiled kernels can't be kept in {folder}: {error.strerror}; "
            "set TRITON_CACHE_DIR to a folder that can be written"
        ) from None
