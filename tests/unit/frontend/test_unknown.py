"""Fields that nobody knows, at every level."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from frontend.protocol import ChatRequest, CompletionRequest
from frontend.unknown import unknown_fields


class Tree(Struct):
    leaf: int | None = None
    trees: "list[Tree] | None" = None


class Cat(Struct, tag="cat", tag_field="type"):
    purrs: bool = True


class Dog(Struct, tag="dog", tag_field="type", rename={"barks": "loud"}):
    barks: bool = True


class Zoo(Struct):
    animals: list[Cat | Dog] | Cat | str | None = None
    free: dict[str, Any] | None = None


@pytest.mark.parametrize(
    ("kind", "body", "names"),
    [
        (ChatRequest, {"model": "m", "messages": []}, []),
        (ChatRequest, {"zeta": 1, "model": "m", "messages": [], "alpha": {"model": 1}}, ["zeta", "alpha"]),
        (
            ChatRequest,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}, {"x": 2, "y": 3}]},
                    {"role": "user", "content": "a", "weight": 1},
                ],
                "stream_options": {"include_usage": True, "chunk": 1},
                "metadata": {"whatever": {"a": 1}},
            },
            ["messages.content.x", "messages.content.y", "messages.weight", "stream_options.chunk"],
        ),
        (CompletionRequest, {"prompt": [[1, 2], [3]], "messages": []}, ["messages"]),
        (Tree, {"trees": [{"bud": 1}]}, []),
        (Zoo, {"animals": [{"type": "cat", "purrs": 1}, {"type": "dog", "loud": 1, "barks": 1}]}, ["animals.barks"]),
        (Zoo, {"animals": {"type": "cat", "wings": 2}, "free": {"wings": 2}}, ["animals.wings"]),
        (Zoo, {"animals": "cat"}, []),
    ],
)
def test_names_by_level(kind: type, body: dict[str, Any], names: list[str]) -> None:
    assert unknown_fields(msgspec.json.encode(body), kind) == names


@given(st.dictionaries(st.text(max_size=3), st.integers(), max_size=5))
def test_every_field_is_either_known_or_named(extra: dict[str, int]) -> None:
    body = {"messages": [{**extra, "role": "user"}], **extra}
    known, inner = set(ChatRequest.__struct_fields__), {"role", "content", "name"}
    expected = {name for name in extra if name not in known} | {
        f"messages.{name}" for name in extra if name not in inner
    }
    assert set(unknown_fields(msgspec.json.encode(body), ChatRequest)) == expected
