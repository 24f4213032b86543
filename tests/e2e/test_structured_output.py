"""Structured output over HTTP and ZeroMQ on the real server.

The figures of issue 5, point 4: `pytest -s -m slow tests/e2e/test_structured_output.py`.
"""

import json
import re
import statistics
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from ipc import BadRequest, Client
from ipc.messages import Grammar
from tests.e2e.schemas import COLOUR, SCHEMAS, array, obj, ref, text
from tests.e2e.server import Server
from tests.e2e.sse import Answer, post_all

SAMPLES = 4
QUICK = (0, 9, 10, 16, 24, 29, 33)  # of SCHEMAS


def ask(server: Server, *bodies: dict[str, Any], at_once: bool = True) -> list[Answer]:
    """Chat requests with a seed of their own each."""
    defaults = {"model": "smol", "messages": [{"role": "user", "content": "Answer in JSON."}], "max_tokens": 200}
    return post_all(
        server.url + "/v1/chat/completions",
        [{**defaults, "seed": number, **body} for number, body in enumerate(bodies)],
        at_once=at_once,
    )


def schema_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}}


def outputs(answer: Answer) -> list[tuple[str, str]]:
    """Text and finish reason of each choice."""
    assert answer.status == 200, answer.body
    return [(choice["message"]["content"], choice["finish_reason"]) for choice in answer.body["choices"]]


def check(schema: Any, answer: Answer) -> tuple[int, int]:
    """How many outputs are whole, and how many were cut by `max_tokens`; every whole one must validate."""
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    whole = cut = 0
    for content, reason in outputs(answer):
        if reason == "length":
            cut += 1
            continue
        assert reason == "stop"
        whole += 1
        validator.validate(json.loads(content))
    return whole, cut


def outside_strings(document: str) -> str:
    """A JSON text, or the beginning of one, without its strings."""
    return re.sub(r'"(?:[^"\\]|\\.)*(?:"|\\?$)', "", document)


@pytest.mark.parametrize("number", QUICK)
def test_every_output_is_what_the_schema_says(server: Server, number: int) -> None:
    (answer,) = ask(server, {**schema_format(SCHEMAS[number]), "n": SAMPLES})
    whole, _ = check(SCHEMAS[number], answer)
    assert whole > 0


@pytest.mark.slow
def test_fifty_schemas(server: Server) -> None:
    """Also prints the time per token against free generation."""
    free = ask(server, *[{"ignore_eos": True, "max_tokens": 60} for _ in range(8)], at_once=False)
    free_ms = statistics.median(1e3 * answer.ended / answer.usage["completion_tokens"] for answer in free)
    whole = cut = 0
    times = []
    for schema in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(schema)
        for answer in ask(server, *[schema_format(schema)] * SAMPLES, at_once=False):
            found = check(schema, answer)
            whole, cut = whole + found[0], cut + found[1]
            if answer.usage["completion_tokens"] >= 20:
                times.append(1e3 * answer.ended / answer.usage["completion_tokens"])
    assert whole + cut == SAMPLES * len(SCHEMAS) == 200
    print(
        f"\n{whole} of 200 outputs are whole and valid, {cut} were cut by max_tokens; ms a token of outputs from 20 "
        f"tokens, the prompt included: {statistics.median(times):.1f} with a schema, {free_ms:.1f} without"
    )


def test_b065_an_enum_behind_a_reference_stays_an_enum(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": ref("C")},
        "required": ["colour"],
        "$defs": {"C": COLOUR},
    }
    (answer,) = ask(server, {**schema_format(schema), "n": 16, "temperature": 2, "max_tokens": 40})
    check(schema, answer)
    found = {re.match('{"colour": ?"(red|blue|зелёный)"', content) for content, _ in outputs(answer)}
    assert None not in found
    assert len({match[1] for match in found if match}) > 1


def test_b066_a_pattern_leaves_the_length_limit_alone(server: Server) -> None:
    for schema in ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, {"pattern": "^[a-z]+$", "maxLength": 3}):
        (answer,) = ask(server, {**schema_format(schema), "n": 8, "max_tokens": 30})
        check(schema, answer)
    (refused,) = ask(server, schema_format({"type": "array", "uniqueItems": True}))
    assert refused.status == 400
    assert refused.body["error"]["param"] == "response_format.json_schema.schema"
    assert "uniqueItems" in refused.body["error"]["message"]


@pytest.mark.parametrize("most", [120, pytest.param(1024, marks=pytest.mark.slow)])
def test_b067_no_drift_into_blank_lines(server: Server, most: int) -> None:
    formats = [{"response_format": {"type": "json_object"}}, schema_format(obj(a=array({"type": "integer"}, 3, 50)))]
    bodies = [{**form, "presence_penalty": 0.14, "temperature": 0, "max_tokens": most} for form in formats]
    for answer in ask(server, *bodies):
        ((content, reason),) = outputs(answer)
        assert re.search(r"\s\s|[\n\t]", outside_strings(content)) is None
        if reason == "stop":
            assert isinstance(json.loads(content), dict)
        else:
            assert reason == "length"
            assert answer.usage["completion_tokens"] == most


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-c]{2,5}-[0-9]{3}"}, "[a-c]{2,5}-[0-9]{3}"),
        ({"structured_outputs": {"choice": ["зел\nёный", 'a "b"']}}, 'зел\nёный|a "b"'),
        ({"guided_grammar": 'start: "<" /[a-z]{1,4}/ ">"'}, "<[a-z]{1,4}>"),
        ({"structured_outputs": {"grammar": 'root ::= ("ab" | "c"){2}\n'}}, "(ab|c){2}"),
    ],
)
def test_the_other_kinds(server: Server, fields: dict[str, Any], pattern: str) -> None:
    """They end by themselves, with the last token that they allow, whatever else would keep them going."""
    going = {"ignore_eos": True, "min_tokens": 150}
    for answer in ask(server, {**fields, "n": 4}, {**fields, **going, "temperature": 0}):
        for content, reason in outputs(answer):
            assert reason == "stop"
            assert re.fullmatch(pattern, content)


def test_stream_choices_log_probabilities_and_stop_strings_work_together(server: Server) -> None:
    fields = {"guided_regex": "[a-z]{4}, [a-z]{4}!", "n": 3, "logprobs": True, "top_logprobs": 2}
    whole, stopped, streamed = ask(
        server, {**fields, "seed": 7}, {**fields, "seed": 7, "stop": [", "]}, {**fields, "seed": 7, "stream": True}
    )
    texts = [content for content, _ in outputs(whole)]
    assert all(re.fullmatch("[a-z]{4}, [a-z]{4}!", content) for content in texts)
    for choice in whole.body["choices"]:
        tokens = choice["logprobs"]["content"]
        assert "".join(token["token"] for token in tokens) == choice["message"]["content"]
        assert all(token["logprob"] <= 0 and len(token["top_logprobs"]) == 2 for token in tokens)
    assert outputs(stopped) == [(content.partition(", ")[0], "stop") for content in texts]
    assert streamed.text == texts[0]
    assert streamed.finish_reason == "stop"
    assert streamed.done


def test_the_same_tokens_alone_and_beside_others(server: Server) -> None:
    bodies: list[dict[str, Any]] = [
        {**schema_format(SCHEMAS[3]), "temperature": 0, "max_tokens": 40},
        {**schema_format(SCHEMAS[3]), "max_tokens": 40},
        {"max_tokens": 40},
        {"guided_regex": "([a-z]+ ){20}", "max_tokens": 40, "frequency_penalty": 0.5},
        {"max_tokens": 40, "temperature": 0},
    ]
    assert [answer.text for answer in ask(server, *bodies)] == [a.text for a in ask(server, *bodies, at_once=False)]


def test_parameters_that_contradict_a_grammar_end_the_request_and_nothing_else(server: Server) -> None:
    """Of "a" every spelling is ruled out by the request itself."""
    ids = post_all(
        server.url + "/v1/completions",
        [{"model": "smol", "prompt": "x", "guided_regex": "a", "return_token_ids": True, "max_tokens": 5}],
    )[0].body["choices"][0]["token_ids"]
    contradicting = {"guided_regex": "a", "stop_token_ids": ids, "min_tokens": 3}
    refused, good = ask(server, contradicting, {"guided_regex": "a"})
    assert refused.status == 400
    assert refused.body["error"]["param"] == "guided_regex"
    assert "min_tokens" in refused.body["error"]["message"]
    assert outputs(good) == [("a", "stop")]
    biased = ask(server, {"guided_choice": ["a"], "logit_bias": dict.fromkeys(map(str, ids), -100)})
    assert outputs(biased[0]) == [("a", "stop")]


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"guided_regex": "(a|b"}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", "unknown name"),
        ({"guided_grammar": "start: <|im_end|>"}, "guided_grammar", "end-of-sequence"),
        ({"structured_outputs": {"json": {"type": "string", "maxlength": 3}}}, "structured_outputs.json", "maxlength"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json", "only one"),
    ],
)
def test_what_cannot_be_compiled_is_a_400_by_name(
    server: Server, fields: dict[str, Any], param: str, part: str
) -> None:
    (answer,) = ask(server, fields)
    assert answer.status == 400
    assert answer.body["error"]["param"] == param
    assert part in answer.body["error"]["message"]


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    population: int | None
    twin: "City | None" = None


def test_the_official_client_parses_what_it_asked_for(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)
    answer = client.chat.completions.parse(
        model="smol",
        messages=[{"role": "user", "content": "Describe Paris."}],
        response_format=City,
        temperature=0,
        max_tokens=300,
    )
    assert isinstance(answer.choices[0].message.parsed, City)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smol", prompt="x", extra_body={"guided_regex": "("})
    assert caught.value.param == "guided_regex"


def test_the_sdk_sends_grammars_too(server: Server) -> None:
    found = re.search(r"ZeroMQ clients: (\S+?)\)?$", server.stderr, re.MULTILINE)
    assert found is not None
    with Client(found[1], timeout=10) as client:
        grammar = Grammar("json_schema", json.dumps(obj(a=text(5))))
        answer = client.generate("JSON: ", max_tokens=60, grammar=grammar)
        assert answer.finish_reason == "stop"
        assert len(json.loads(answer.text)["a"]) <= 5
        with pytest.raises(BadRequest) as caught:
            client.generate("x", grammar=Grammar("regex", "("))
        assert caught.value.param == "grammar"
