"""50 JSON schemas of the kinds that clients send: nested, with references, choices, patterns, numbers and unicode."""

from typing import Any

Schema = dict[str, Any]


def obj(optional: tuple[str, ...] = (), **properties: Any) -> Schema:
    """An object with these properties and no others."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def text(most: int = 24, **fields: Any) -> Schema:
    return {"type": "string", "maxLength": most, **fields}


def array(items: Any, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def enum(*values: Any) -> Schema:
    return {"enum": list(values)}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


INTEGER: Schema = {"type": "integer", "minimum": -1000, "maximum": 1000}
NUMBER: Schema = {"type": "number", "minimum": -1, "maximum": 1}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
COLOUR: Schema = enum("red", "blue", "зелёный")
DRAFT = "http://json-schema.org/draft-07/schema#"

SCHEMAS: list[Schema] = [
    # objects
    obj(name=text(), age={"type": "integer", "minimum": 0, "maximum": 120}),
    obj(("nick",), name=text(), nick=text(12)),
    obj(a=obj(b=obj(c=obj(d=BOOLEAN)))),
    obj(person=obj(name=text(), address=obj(street=text(), zip=text(pattern="^[0-9]{5}$"))), tags=array(text(8), 1, 3)),
    {
        "type": "object",
        "properties": {"x": INTEGER},
        "required": ["x"],
        "additionalProperties": INTEGER,
        "maxProperties": 3,
    },
    {
        "type": "object",
        "patternProperties": {"^s_[a-z]{1,6}$": text(6)},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    {"type": "object", "additionalProperties": BOOLEAN, "maxProperties": 2},
    obj(**{f"field{i}": enum(i, -i) for i in range(1, 13)}),
    obj(("a", "b", "c"), a=INTEGER, b=BOOLEAN, c=NULL),
    obj(**{'quote"back\\slash\n': INTEGER, "ключ": COLOUR, "鍵": BOOLEAN, "🔑": NULL}),
    # references
    {**obj(colour=ref("C")), "$defs": {"C": COLOUR}},
    {**obj(first=ref("P"), second=ref("P")), "$defs": {"P": obj(x=INTEGER, y=ref("N")), "N": NUMBER}},
    {"$ref": "#/$defs/Tree", "$defs": {"Tree": obj(v=enum(1, 2), next={"anyOf": [NULL, ref("Tree")]})}},
    {"$schema": DRAFT, **obj(a={"$ref": "#/definitions/S"}), "definitions": {"S": text(5)}},
    {**obj(a=text(4), b={"$ref": "#/properties/a"})},
    {**array(ref("Item"), 1, 2), "$defs": {"Item": {"anyOf": [ref("Num"), COLOUR]}, "Num": INTEGER}},
    # choices
    {"anyOf": [obj(kind={"const": "circle"}, r=NUMBER), obj(kind={"const": "box"}, w=INTEGER, h=INTEGER)]},
    {"oneOf": [obj(type={"const": "a"}, v=INTEGER), obj(type={"const": "b"}, v=text(6))]},
    obj(value={"anyOf": [text(6), INTEGER, NULL, array(BOOLEAN, 0, 2)]}),
    {"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": 9},
    {"allOf": [{"type": "string"}, {"maxLength": 4}, {"pattern": "^[xyz]+$"}]},
    {"allOf": [{"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}, obj(a=INTEGER, b=BOOLEAN)]},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "string", "pattern": "^[0-9]{4}$"}]},
    # enumerations and constants
    enum("yes", "no", "maybe"),
    enum(1, "1", 1.5, True, None, [1, 2], {"a": "b"}),
    {"const": {"nested": [1, {"deep": "значение"}]}},
    obj(mood=enum("😀", "😢", "\u0007", 'a"b')),
    enum("a", "ab", "abc", "b"),
    {"type": "string", "enum": ["north", "south"]},
    # strings
    text(3, pattern="^[a-z]+$"),
    text(10, minLength=10),
    {"type": "string", "pattern": "^(\\+[0-9]{1,3} )?[0-9]{3}-[0-9]{4}$"},
    {"type": "string", "pattern": "^[А-Яа-яё]{2,8}$"},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}( [0-9]{4}){2}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time", "maxLength": 25},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    obj(email={"type": "string", "format": "email", "maxLength": 20}),
    text(0),
    # numbers
    {"type": "integer", "minimum": 0, "maximum": 255},
    {"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5},
    {"type": "integer", "minimum": 100, "maximum": 999, "multipleOf": 5},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
    obj(lat={"type": "number", "minimum": -90, "maximum": 90}, lon={"type": "number", "minimum": -180, "maximum": 180}),
    # arrays
    array(INTEGER, 3, 5),
    array(array(enum(0, 1), 2, 2), 2, 2),
    {"type": "array", "prefixItems": [text(5), INTEGER, BOOLEAN], "items": False, "minItems": 3},
    array(obj(id={"type": "integer", "minimum": 1, "maximum": 99}, name=text(10)), 2, 3),
    array(COLOUR, 3, 3),
]
