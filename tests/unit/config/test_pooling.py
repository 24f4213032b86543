"""How models declare the pooling of their embeddings, and what is made of it at start."""

import json
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest

from config.arch import read_arch
from config.pooling import pooling_of_directory
from config.sources import ConfigError
from tests.unit.config.test_arch_gguf import write
from tests.unit.config.test_resolve_choices import SMOLLM2_135M, reason, settle

# As sentence-transformers writes them.
MODULES = "sentence_transformers.models"


def declare(path: Path, pooling: dict[str, Any] | None, *modules: str) -> Path:
    if modules:
        entries = [
            {"idx": at, "name": str(at), "path": f"{at}_{name}" if at else "", "type": f"{MODULES}.{name}"}
            for at, name in enumerate(modules)
        ]
        (path / "modules.json").write_text(json.dumps(entries))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def flags(*chosen: str) -> dict[str, Any]:
    kinds = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {"word_embedding_dimension": 64, **{f"pooling_mode_{kind}": kind in chosen for kind in kinds}}


@pytest.mark.parametrize(
    ("pooling", "modules", "declared"),
    [
        (flags("mean_tokens"), ("Transformer", "Pooling", "Normalize"), "mean"),
        (flags("lasttoken"), ("Transformer", "Pooling"), "last"),
        (flags("cls_token"), (), "cls"),
        (flags("mean_sqrt_len_tokens"), (), "mean"),
        ({"embedding_dimension": 64, "pooling_mode": "lasttoken"}, ("Transformer", "Pooling"), "last"),
        (flags("mean_tokens", "max_tokens"), (), "mean+max"),
        (flags("mean_tokens"), ("Transformer", "Pooling", "Dense", "Normalize"), "mean, then Dense"),
        (None, ("Transformer",), ""),
        (None, (), ""),
    ],
)
def test_sentence_transformers_modules(
    pooling: dict[str, Any] | None, modules: tuple[str, ...], declared: str, tmp_path: Path
) -> None:
    assert pooling_of_directory(declare(tmp_path, pooling, *modules)) == declared


@pytest.mark.parametrize(
    ("kind", "declared"),
    [
        (gguf.PoolingType.NONE, ""),
        (gguf.PoolingType.MEAN, "mean"),
        (gguf.PoolingType.CLS, "cls"),
        (gguf.PoolingType.LAST, "last"),
        (gguf.PoolingType.RANK, "rank"),
    ],
)
def test_gguf_files(kind: gguf.PoolingType, declared: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", lambda writer: writer.add_pooling_type(kind))
    assert read_arch(path).pooling == declared


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "not a list of modules"),
        ("[", "not valid JSON"),
        ('["x"]', "without a type"),
        ('[{"type": "a.Pooling", "path": "../../x"}]', "not inside this directory"),
    ],
)
def test_modules_of_another_form_are_an_error(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ValueError, match=problem):
        pooling_of_directory(tmp_path)


@pytest.mark.parametrize("pooling", [{"pooling_mode": 3}, {"pooling_mode": []}, {"pooling_mode_cls_token": "yes"}])
def test_a_pooling_of_another_form_is_an_error(pooling: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pooling_mode"):
        pooling_of_directory(declare(tmp_path, pooling))


def test_the_model_decides_unless_somebody_says_otherwise() -> None:
    assert settle().config.model.pooling == "last"
    mean = msgspec.structs.replace(SMOLLM2_135M, pooling="mean")
    resolved = settle(arch=mean)
    assert resolved.config.model.pooling == "mean"
    assert "what the model declares" in reason(resolved, "pooling mean")
    assert settle("--pooling", "cls", arch=mean).config.model.pooling == "cls"


def test_a_pooling_that_is_not_supported_is_named() -> None:
    rank = msgspec.structs.replace(SMOLLM2_135M, pooling="rank")
    with pytest.raises(ConfigError, match=r"declares pooling 'rank'.* --pooling last\|mean\|cls"):
        settle(arch=rank)
    assert settle("--pooling", "last", arch=rank).config.model.pooling == "last"
    with pytest.raises(ConfigError, match="--pooling"):
        settle("--pooling", "max")
