"""What is taken from generation_config.json and from the sampling keys of GGUF files."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from transformers import GenerationConfig

from config.generation import describe, read_generation
from config.schema import GenerationDefaults


def test_what_transformers_saves(tmp_path: Path) -> None:
    saved = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.05, max_new_tokens=2048
    )
    saved.save_pretrained(tmp_path)
    defaults, refused = read_generation(tmp_path)
    assert not refused
    assert defaults == GenerationDefaults(
        temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.05, max_new_tokens=2048
    )
    assert describe(defaults) == (
        "sampling defaults: temperature 0.6, top_p 0.9, top_k 20, min_p 0.05, repetition_penalty 1.05, "
        "max_new_tokens 2048, as the model recommends (--generation-config none: OpenAI's)"
    )


def test_without_the_file_nothing_is_recommended(tmp_path: Path) -> None:
    assert read_generation(tmp_path) == (GenerationDefaults(), [])
    assert describe(GenerationDefaults()) == "sampling defaults: OpenAI's"


def test_keys_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_float32("general.sampling.temp", 0.7)
    writer.add_float32("general.sampling.top_p", 0.8)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_float32("general.sampling.penalty_repeat", 1.05)
    writer.add_int32("general.sampling.penalty_last_n", 64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = GenerationDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
    assert read_generation(path) == (expected, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
    ],
)
def test_what_makes_no_sense_is_not_used_and_said(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(
        json.dumps({name: value, "top_k": 7} if name != "top_k" else {name: value})
    )
    defaults, (line,) = read_generation(tmp_path)
    assert getattr(defaults, name) is None
    assert f"{name} {value!r} is not used" in line


def test_not_a_number_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": NaN, "top_p": Infinity}')
    defaults, lines = read_generation(tmp_path)
    assert defaults == GenerationDefaults()
    assert len(lines) == 2


@pytest.mark.parametrize("text", ["[1]", "{", "3"])
def test_a_broken_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        read_generation(tmp_path)
