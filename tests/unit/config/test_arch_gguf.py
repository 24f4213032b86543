"""`read_arch` on GGUF files whose metadata says something else than usual, or nothing sensible."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from config.arch import read_arch
from config.schema import RopeConfig

Change = Callable[[gguf.GGUFWriter], Any]


def write(path: Path, *changes: Change, architecture: str = "llama", omitted: str = "", tensors: bool = True) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {
        "context_length": 512,
        "embedding_length": 64,
        "block_count": 3,
        "feed_forward_length": 160,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }.items():
        if name != omitted:
            writer.add_uint32(f"{architecture}.{name}", value)
    for change in changes:
        change(writer)
    if tensors:
        writer.add_tensor("token_embd.weight", np.zeros((100, 64), np.float32))
        writer.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_sizes_biases_and_ids(tmp_path: Path) -> None:
    path = write(
        tmp_path / "tiny.gguf",
        lambda writer: writer.add_eos_token_id(99),
        lambda writer: writer.add_eot_token_id(7),
        lambda writer: writer.add_layer_norm_rms_eps(0.5),
        lambda writer: writer.add_key_length(32),
        lambda writer: writer.add_value_length(32),
        architecture="qwen2",
    )
    arch = read_arch(path)
    assert (arch.hidden_size, arch.num_layers, arch.intermediate_size, arch.max_position) == (64, 3, 160, 512)
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.vocab_size) == (4, 2, 32, 100)
    assert (arch.qkv_bias, arch.o_bias, arch.mlp_bias, arch.tie_embeddings) == (True, False, False, True)
    assert (arch.eos_token_ids, arch.rms_norm_eps) == ((7, 99), 0.5)
    assert (arch.weight_bytes, arch.num_parameters, arch.name) == (4 * 6464, 6464, "tiny")


def test_rope_scaling(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    base: Change = lambda writer: writer.add_rope_freq_base(500000.0)  # noqa: E731
    assert read_arch(write(path, base)).rope == RopeConfig(theta=500000.0)
    old: Change = lambda writer: writer.add_float32("llama.rope.scale_linear", 4.0)  # noqa: E731
    assert read_arch(write(path, old)).rope == RopeConfig(type="linear", factor=4.0)
    yarn: list[Change] = [
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN),
        lambda writer: writer.add_rope_scaling_factor(4.0),
        lambda writer: writer.add_rope_scaling_orig_ctx_len(128),
    ]
    assert read_arch(write(path, *yarn)).rope == RopeConfig(type="yarn", factor=4.0, original_max_position=128)


@pytest.mark.parametrize(
    ("architecture", "pattern", "windows"),
    [
        ("llama", None, (32, 32, 32)),
        ("qwen2", None, ()),  # which of its layers have it, nobody says
        *(
            (architecture, pattern, windows)
            for architecture in ("llama", "qwen2")
            for pattern, windows in [
                ([False, True, True], (0, 32, 32)),
                ([False, False, False], ()),
                (0, (32, 32, 32)),
                (1, ()),
                (2, (32, 0, 32)),
                (3, (32, 32, 0)),
            ]
        ),
    ],
)
def test_a_pattern_says_which_layers_have_the_sliding_window(
    architecture: str, pattern: int | list[bool] | None, windows: tuple[int, ...], tmp_path: Path
) -> None:
    changes: list[Change] = [lambda writer: writer.add_sliding_window(32)]
    if pattern is not None:
        changes.append(lambda writer: writer.add_sliding_window_pattern(pattern))
    arch = read_arch(write(tmp_path / "tiny.gguf", *changes, architecture=architecture))
    assert (arch.windows, arch.max_position) == (windows, 512)
    del changes[0]
    assert read_arch(write(tmp_path / "tiny.gguf", *changes, architecture=architecture)).windows == ()


@pytest.mark.parametrize("pattern", [[True], [1, 0, 2], ["a", "b", "c"], "all"])
def test_a_pattern_that_says_nothing_is_refused(pattern: Any, tmp_path: Path) -> None:
    key = "qwen2.attention.sliding_window_pattern"
    add: Change = lambda w: w.add_string(key, pattern) if isinstance(pattern, str) else w.add_array(key, pattern)  # noqa: E731
    path = write(tmp_path / "tiny.gguf", lambda w: w.add_sliding_window(32), add, architecture="qwen2")
    with pytest.raises(ValueError, match=r"attention\.sliding_window_pattern is "):
        read_arch(path)


EOS = "tokenizer.ggml.eos_token_id"
REFUSED: dict[str, tuple[list[Change], dict[str, Any], str]] = {
    "architecture": ([], {"architecture": "mamba"}, "architecture mamba is not supported; supported: llama, qwen2"),
    "size": ([], {"omitted": "block_count"}, "block_count is None, not an integer"),
    "no_tensors": ([], {"tensors": False}, r"there is no token_embd\.weight matrix"),
    "experts": ([lambda w: w.add_expert_count(8)], {}, "mixture-of-experts models are not supported"),
    "partial_rope": ([lambda w: w.add_rope_dimension_count(8)], {}, "rotary embedding of a part of the head"),
    "value_length": ([lambda w: w.add_value_length(8)], {}, "keys and values of different head sizes"),
    "longrope": ([lambda w: w.add_string("llama.rope.scaling.type", "longrope")], {}, "'longrope' is not supported"),
    "list_of_heads": (
        [lambda w: w.add_array("llama.attention.head_count", [4, 4])],
        {"omitted": "attention.head_count"},
        r"attention\.head_count is \[4, 4\], not an integer",
    ),
    "theta": ([lambda w: w.add_rope_freq_base(-1.0)], {}, r"rope\.freq_base is -1\.0, not a positive number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    changes, settings, message = REFUSED[name]
    path = write(tmp_path / "tiny.gguf", *changes, **settings)
    with pytest.raises(ValueError, match=message) as caught:
        read_arch(path)
    assert str(caught.value).startswith(str(path))


def test_ids_that_are_not_numbers_end_nothing(tmp_path: Path) -> None:
    path = write(
        tmp_path / "tiny.gguf",
        lambda writer: writer.add_array(EOS, [1, 2]),
        lambda writer: writer.add_eot_token_id(7),
    )
    assert read_arch(path).eos_token_ids == (7,)


def test_an_architecture_that_is_a_list_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf")
    name = b"general.architecture" + (8).to_bytes(4, "little")
    data = path.read_bytes()
    start = data.index(name) + len(name) - 4
    # An array of one byte takes as many bytes as the five letters did, so nothing else moves.
    array = (9).to_bytes(4, "little") + (0).to_bytes(4, "little") + (1).to_bytes(8, "little") + b"\x05"
    assert len(array) == 4 + 8 + len("llama")
    path.write_bytes(data[:start] + array + data[start + len(array) :])
    with pytest.raises(ValueError, match=r"architecture \[5\] is not supported"):
        read_arch(path)
