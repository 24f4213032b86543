"""Files of settings, written as they are by hand: an entry a line."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from kernels.gpu.tables import Entry


def formatted(measured: str, kernels: Mapping[str, Sequence[Entry]]) -> str:
    """The text of a file of the table."""
    blocks = [
        f"    {json.dumps(kernel)}: [\n" + ",\n".join(f"      {json.dumps(entry)}" for entry in entries) + "\n    ]"
        for kernel, entries in kernels.items()
    ]
    return f'{{\n  "measured": {json.dumps(measured)},\n  "kernels": {{\n' + ",\n".join(blocks) + "\n  }\n}\n"


def rewrite(folder: Path, tuned: Mapping[str, Sequence[Entry]], measured: str) -> list[Path]:
    """Put the entries of the kernels `tuned` into the files of an architecture's `folder`; those that were written.

    Where a file has other kernels as well, `measured` names those that it is true of, after what it said before.
    """
    written = []
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text())
        kernels: dict[str, Sequence[Entry]] = content["kernels"]
        ours = [kernel for kernel in kernels if kernel in tuned]
        if not ours:
            continue
        said = measured
        if len(ours) < len(kernels):
            said = "; ".join(filter(None, [content["measured"], f"{measured} ({', '.join(ours)})"]))
        file.write_text(formatted(said, {kernel: tuned.get(kernel, kernels[kernel]) for kernel in kernels}))
        written.append(file)
    return written
