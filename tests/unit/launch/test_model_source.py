"""Finding the model that `--model` means."""

import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from ipc.control import StartError
from launch.model_source import DESCRIPTIONS, WANTED_FILES, locate

REPOSITORY = Path(__file__).resolve().parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def said(model: str) -> str:
    with pytest.raises(StartError) as caught:
        locate(model, None)
    return str(caught.value)


def test_a_directory_of_safetensors_is_called_by_its_name(tmp_path: Path) -> None:
    folder = make(tmp_path / "Tiny-1B", "config.json", "model.safetensors")
    source = locate(str(folder), None)
    assert (source.path, source.name) == (folder, "Tiny-1B")
    assert locate(f"{folder}/", None) == source


def test_a_gguf_file_is_called_by_its_name_without_the_ending(tmp_path: Path) -> None:
    file = make(tmp_path, "Tiny-1B.Q4_1.gguf") / "Tiny-1B.Q4_1.gguf"
    source = locate(str(file), None)
    assert (source.path, source.name) == (file, "Tiny-1B.Q4_1")


def test_pickled_weights_are_never_loaded(tmp_path: Path) -> None:
    folder = make(tmp_path, "config.json", "pytorch_model.bin")
    assert "Pickled weights (.bin, .pt) are never loaded" in said(str(folder))


def test_a_directory_that_holds_a_gguf_file_says_which(tmp_path: Path) -> None:
    assert "It contains a.gguf: give that file." in said(str(make(tmp_path, "a.gguf")))


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    assert "must be a .gguf file" in said(str(make(tmp_path, "a.bin") / "a.bin"))


@pytest.mark.parametrize("model", ["./nowhere", "nowhere", "a/b/c", "models/none.gguf", "../x/y", "/no/such"])
def test_what_is_neither_a_path_nor_a_hub_id_says_both(model: str) -> None:
    assert "no such file or directory" in said(model)
    assert str(Path(model).absolute()) in said(model)


def test_a_plan_takes_a_config_alone(tmp_path: Path) -> None:
    make(tmp_path, "config.json")
    assert "no .safetensors file" in said(str(tmp_path))
    assert locate(str(tmp_path), None, needs_weights=False).path == tmp_path
    (tmp_path / "config.json").unlink()
    with pytest.raises(StartError, match=r"this directory has no config\.json"):
        locate(str(tmp_path), None, needs_weights=False)


def test_of_a_hub_id_a_plan_fetches_descriptions_only() -> None:
    assert any(fnmatch("config.json", pattern) for pattern in DESCRIPTIONS)
    assert not any(fnmatch("model.safetensors", pattern) for pattern in DESCRIPTIONS)


def run_locate(cache: Path, *arguments: str, prelude: str = "") -> subprocess.CompletedProcess[str]:
    """`locate` in a process of its own, since the hub client reads its environment when it is imported."""
    program = (
        f"{prelude}\nimport sys\nfrom ipc.control import StartError\nfrom launch.model_source import locate\n"
        "try:\n    print(locate(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None).path)\n"
        "except StartError as error:\n    sys.exit(str(error))"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    """A cache as the hub client keeps it: refs name a commit, snapshots hold its files."""
    pytest.importorskip("huggingface_hub", reason="the hub client is not installed")
    model = tmp_path / "models--owner--tiny"
    make(model / "snapshots" / COMMIT, "config.json", "model.safetensors")
    make(model / "refs")
    (model / "refs" / "main").write_text(COMMIT)
    return tmp_path


def test_a_hub_id_is_found_in_the_local_cache_without_a_network(hub_cache: Path) -> None:
    found = run_locate(hub_cache, "owner/tiny")
    assert found.stdout.strip() == str(hub_cache / "models--owner--tiny" / "snapshots" / COMMIT), found.stderr
    assert run_locate(hub_cache, "owner/tiny", COMMIT).stdout == found.stdout


def test_a_hub_id_that_cannot_be_had_is_one_clear_paragraph(hub_cache: Path) -> None:
    missing = run_locate(hub_cache, "owner/other", "v2")
    assert missing.returncode == 1
    assert "--model owner/other" in missing.stderr
    assert "could not be fetched from the hub at revision v2" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_without_the_hub_client_it_says_how_to_install_it(tmp_path: Path) -> None:
    found = run_locate(tmp_path, "owner/tiny", prelude="import sys; sys.modules['huggingface_hub'] = None")
    assert found.returncode == 1
    assert "pip install huggingface_hub" in found.stderr


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("config.json", True),
        ("generation_config.json", True),
        ("tokenizer.json", True),
        ("tokenizer.model", True),
        ("chat_template.jinja", True),
        ("pytorch_model.bin", False),
        ("consolidated.00.pth", False),
        ("modeling_x.py", False),
        ("model.gguf", False),
        ("training_args.pt", False),
    ],
)
def test_only_data_is_fetched(name: str, wanted: bool) -> None:
    assert any(fnmatch(name, pattern) for pattern in WANTED_FILES) is wanted
