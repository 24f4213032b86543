"""From what `--model` says to files on this machine: a local directory, a .gguf file, or a model of the hub.

Only data is ever fetched: safetensors, JSON, tokenizer files and chat templates. Pickled weights (*.bin, *.pt) and
Python files of a model repository are never taken.
"""

import re
from pathlib import Path

from msgspec import Struct

from ipc.control import StartError

DESCRIPTIONS = ("*.json",)  # all that a memory plan takes
WANTED_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


class ModelSource(Struct, frozen=True):
    """Where the model's files are, and what it is called when `--served-model-name` does not say."""

    path: Path
    name: str


def locate(model: str, revision: str | None, needs_weights: bool = True) -> ModelSource:
    """Find, or fetch, what `--model` means; StartError with what to do when there is no such thing.

    Without `needs_weights` a directory may have a config.json alone, and of a hub id no more is fetched.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        _check_directory(path, needs_weights)
        return ModelSource(path.resolve(), path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise StartError(
                f"--model {model}: a single file must be a .gguf file; give the directory for safetensors."
            )
        return ModelSource(path.resolve(), path.stem)
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(model):
        raise StartError(
            f"--model {model}: no such file or directory, and not a hub id, which looks like owner/name. "
            f"Looked for {path.absolute()}."
        )
    return ModelSource(_fetch(model, revision, needs_weights), model)


def _check_directory(path: Path, needs_weights: bool) -> None:
    if not (path / "config.json").is_file():
        files = sorted(found.name for found in path.glob("*.gguf"))
        hint = f" It contains {files[0]}: give that file." if files else ""
        raise StartError(f"--model {path}: this directory has no config.json.{hint}")
    if needs_weights and not any(path.glob("*.safetensors")):
        pickled = any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth"))
        hint = " Pickled weights (.bin, .pt) are never loaded: convert them to safetensors." if pickled else ""
        raise StartError(f"--model {path}: this directory has no .safetensors file.{hint}")


def _fetch(model: str, revision: str | None, needs_weights: bool) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise StartError(
            f"--model {model}: no such path on this machine; to fetch it from the hub by its id, install the hub "
            "client first: pip install huggingface_hub"
        ) from None
    try:
        wanted = WANTED_FILES if needs_weights else DESCRIPTIONS
        found = huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=list(wanted))
    except Exception as error:
        # The hub client's exceptions are many, of several libraries, and differ between its releases.
        which = f" at revision {revision}" if revision else ""
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise StartError(
            f"--model {model}: no such path on this machine, and it could not be fetched from the hub{which}: "
            f"{reason[0].rstrip('.')}. Check the id and the network, or download it elsewhere and give its directory."
        ) from None
    path = Path(found)
    _check_directory(path, needs_weights)
    return path
