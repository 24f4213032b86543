"""Names of a body's fields that have no effect, at every level that its type describes.

They are those that the type does not know, and those that it has as `Ignored`.
"""

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, inspect

# A field that is named as if nobody knew it; its values are there for whoever refuses some of them.
Ignored = Annotated[Any, Meta(extra={"ignored": True})]


class Shape(Struct, frozen=True):
    """Fields of an object, or of the objects in a list; None for a field in which nothing is to be looked for."""

    fields: dict[str, "Shape | None"]


@cache
def shape_of(kind: Any) -> Shape | None:
    """The shape that bodies of this type have; None when it describes no object."""
    return _shape(inspect.type_info(kind), ())


def _shape(info: inspect.Type, above: tuple[type, ...]) -> Shape | None:
    if isinstance(info, inspect.StructType):
        if info.cls in above:
            return None  # it contains itself; one level is enough
        inner = (*above, info.cls)
        fields = {field.encode_name: _shape(field.type, inner) for field in info.fields if not _is_ignored(field.type)}
        if isinstance(info.tag_field, str):
            fields[info.tag_field] = None
        return Shape(fields)
    if isinstance(info, inspect.CollectionType):
        return _shape(info.item_type, above)
    if isinstance(info, inspect.UnionType):
        shapes = [shape for item in info.types if (shape := _shape(item, above)) is not None]
        if shapes:
            return Shape({name: field for shape in shapes for name, field in shape.fields.items()})
    return None


def _is_ignored(info: inspect.Type) -> bool:
    return isinstance(info, inspect.Metadata) and bool((info.extra or {}).get("ignored"))


def unknown_fields(data: bytes, kind: Any) -> list[str]:
    """Names such as `bogus` and `messages.bogus`, each once; `data` is an object of this type in valid JSON."""
    shape = shape_of(kind)
    assert shape is not None
    found: dict[str, None] = {}
    for name, value in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).items():
        if name not in shape.fields:
            found[name] = None
        elif (inner := shape.fields[name]) is not None:
            # Only what has such objects is decoded a second time: not a prompt of a million token ids.
            found |= dict.fromkeys(_walk(msgspec.json.decode(value), inner, name))
    return list(found)


def _walk(value: Any, shape: Shape, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _walk(item, shape, path)
    elif isinstance(value, dict):
        for name, inner in value.items():
            where = f"{path}.{name}"
            if name not in shape.fields:
                yield where
            elif (field := shape.fields[name]) is not None:
                yield from _walk(inner, field, where)
