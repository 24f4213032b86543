"""What the commands that compare with the machine's limits have in common."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from config.output_files import check_output
from config.sources import ConfigError
from kernels.cpu.build import detect_isa
from tools.bench_kernels.limits import usable_cores


def check_common(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse bad values of --threads, --seconds and --json."""
    if not 1 <= arguments.threads <= 1024:
        parser.error(f"--threads: must be from 1 to 1024, not {arguments.threads}")
    if not 0 < arguments.seconds <= 3600:
        parser.error(f"--seconds: must be above 0 and at most 3600, not {arguments.seconds}")
    if arguments.json:
        try:
            check_output("--json", arguments.json)
        except ConfigError as error:
            parser.error(str(error))


def write_json(path: Path | None, content: Mapping[str, object]) -> None:
    if path:
        path.write_text(json.dumps(content, indent=1) + "\n")


def machine_line() -> str:
    return (
        f"{usable_cores()} cores ({platform.machine()}), kernels for {detect_isa()}, "
        f"load average {os.getloadavg()[0]:.1f}"
    )


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)
