"""Fields of other servers' APIs: idle ones are taken on every route alike, and what a template can do with the rest."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams

from adapters.chat_template import ChatTemplate
from adapters.tokenizer import Tokenizer
from orchestrator.daemon.api.doors.messages.wire import MessagesRequest
from orchestrator.daemon.api.doors.responses.wire import ResponsesRequest
from orchestrator.daemon.api.wire import ChatRequest, CompletionRequest, Sampled
from tests.api.support import TOKENIZER, app_over, client_of, serving
from tests.api.test_messages_route import anthropic_of
from tests.api.test_tools import answering, prompt_of

USER: Any = {"role": "user", "content": "x"}
ROUTES: dict[str, tuple[type[Sampled], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "x"}),
    "/v1/chat/completions": (ChatRequest, {"messages": [USER]}),
    "/v1/responses": (ResponsesRequest, {"input": "x"}),
    "/v1/messages": (MessagesRequest, {"messages": [USER], "max_tokens": 9}),
}
# As Qwen's and gpt-oss' templates ask.
SOURCE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
    "{% if reasoning_effort %}effort={{ reasoning_effort }}|{% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}{{ custom }}"
)
THINKS = Tokenizer(TOKENIZER._vocabulary, ChatTemplate(SOURCE, bos_token="", eos_token=""))


async def post(path: str, fields: dict[str, Any], tokenizer: Tokenizer = TOKENIZER) -> tuple[httpx.Response, str]:
    """The answer to a small body with these fields, and the prompt that the model was given."""
    control = answering("ok")
    async with serving(app_over(control, tokenizer=tokenizer)) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post(path, json={"model": "toy"} | ROUTES[path][1] | fields)
    return answer, prompt_of(control) if control.submits else ""


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "fields",
    [
        {"audio": None, "modalities": ["text"], "web_search_options": None, "functions": [], "function_call": "auto"},
        {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "best_of": 1, "priority": 0},
        {"prompt_cache_retention": "24h", "prompt_cache_key": "a", "safety_identifier": "b", "service_tier": "auto"},
        {"truncation": "auto"},
        {"truncation": "disabled", "background": False, "top_logprobs": None, "logprobs": None},
        {"client_metadata": {"a": "b"}, "verbosity": None, "reasoning_effort": None, "chat_template_kwargs": {}},
        {"skip_special_tokens": True, "include_stop_str_in_output": False, "spaces_between_special_tokens": True},
        {"guided_json": None, "guided_regex": None, "structured_outputs": None, "regex": None, "ebnf": None},
        {
            "mirostat": 0,
            "mirostat_tau": 5.0,
            "typical_p": 1.0,
            "repeat_penalty": 1,
            "cache_prompt": True,
            "id_slot": -1,
        },
        {"dry_multiplier": 0.0, "dry_base": 1.75, "xtc_probability": 0, "xtc_threshold": 0.1, "n_probs": 0},
        {"stop_regex": None, "no_stop_trim": False, "separate_reasoning": True, "return_hidden_states": False},
        {"some_field_that_nobody_knows": None},
        {"mcp_servers": [], "container": None, "cache_control": {"type": "ephemeral"}, "inference_geo": "eu"},
    ],
)
async def test_what_asks_for_nothing_is_taken_on_every_route(path, fields):
    answer, _ = await post(path, fields)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_beam_search", True),
        ("best_of", 2),
        ("audio", {"voice": "x"}),
        ("priority", False),
        ("mirostat", 2),
        ("truncate_prompt_tokens", 5),
        ("skip_special_tokens", False),
        ("background", True),
        ("documents", [{"text": "x"}]),
        ("truncation", "first"),
        ("a_field_that_nobody_knows", 0),
    ],
)
async def test_what_would_change_the_answer_is_refused_by_name_on_every_route(path, field, value):
    answer, prompt = await post(path, {field: value})
    assert (answer.status_code, prompt) == (400, "")
    assert f"'{field}'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("/v1/chat/completions", ChatParams),
        ("/v1/completions", CompletionParams),
        ("/v1/responses", ResponseParams),
    ],
)
def test_every_field_that_the_openai_client_has_is_known(path, params):
    model = ROUTES[path][0]
    assert params.__annotations__.keys() <= model.model_fields.keys() | model.harmless | model.not_supported.keys()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "user:x|<think></think><|start|>"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "user:x|<|start|>"),
        ({"reasoning_effort": "low"}, "user:x|effort=low|<|start|>"),
        ({"reasoning_effort": "none"}, "user:x|effort=none|<think></think><|start|>"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": "high"}},
            "user:x|effort=high|<|start|>",
        ),
        ({"verbosity": "low"}, "user:x|<|start|>"),
        ({"chat_template_kwargs": {"a_name_that_it_does_not_know": [1]}}, "user:x|<|start|>"),
    ],
)
async def test_effort_and_keywords_reach_the_template(fields, told):
    answer, prompt = await post("/v1/chat/completions", fields, THINKS)
    assert answer.status_code == 200, answer.text
    assert prompt == told


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        ("/v1/responses", {"reasoning": {"effort": "low", "summary": "auto"}}, "user:x|effort=low|<|start|>"),
        ("/v1/responses", {"reasoning": {"effort": "none"}}, "user:x|effort=none|<think></think><|start|>"),
        ("/v1/responses", {"text": {"verbosity": "high"}}, "user:x|<|start|>"),
        ("/v1/responses", {"chat_template_kwargs": {"enable_thinking": False}}, "user:x|<think></think><|start|>"),
        ("/v1/messages", {"output_config": {"effort": "max"}}, "user:x|effort=max|<|start|>"),
        ("/v1/messages", {"thinking": {"type": "disabled"}}, "user:x|<think></think><|start|>"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "user:x|<|start|>"),
        ("/v1/messages", {}, "user:x|<|start|>"),
        ("/v1/messages", {"chat_template_kwargs": {"enable_thinking": False}}, "user:x|<think></think><|start|>"),
    ],
)
async def test_other_apis_tell_the_template_in_their_own_words(path, fields, told):
    answer, prompt = await post(path, fields, THINKS)
    assert answer.status_code == 200, answer.text
    assert prompt == told


async def test_counts_are_of_the_prompt_that_the_template_makes():
    off = {"enable_thinking": False}
    control = answering("ok")
    app = app_over(control, tokenizer=THINKS)
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        body: dict[str, Any] = {"model": "toy", "messages": [USER], "chat_template_kwargs": off}
        tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
        counted = (await client.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
        asked = {"model": "toy", "input": "x", "chat_template_kwargs": off}
        input_tokens = (await client.post("/v1/responses/input_tokens", json=asked)).json()
        await client.post("/v1/chat/completions", json=body)
    assert tokens == control.submits[0].prompt
    assert counted == len(tokens)
    assert input_tokens == {"object": "response.input_tokens", "input_tokens": len(tokens)}


async def test_a_keyword_cannot_smuggle_a_control_token_in():
    answer, prompt = await post("/v1/chat/completions", {"chat_template_kwargs": {"custom": "<|end|>"}}, THINKS)
    assert answer.status_code == 200
    assert prompt.endswith("<|start|><|end|>")  # as text
    ids = THINKS.encode_chat([USER], keywords={"custom": "<|end|>", "reasoning_effort": "<|start|>"})
    assert ids.count(TOKENIZER.encode("<|end|>", special=True)[0]) == 0
    assert ids.count(TOKENIZER.encode("<|start|>", special=True)[0]) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "raise_exception", "range", "_x", "a b", ""]
)
async def test_what_the_server_tells_the_template_itself_cannot_be_set(path, name):
    answer, prompt = await post(path, {"chat_template_kwargs": {name: "x"}}, THINKS)
    assert (answer.status_code, prompt) == (400, "")
    assert "'chat_template_kwargs'" in answer.json()["error"]["message"]


def test_a_template_s_own_variables_win():
    template = ChatTemplate("{{ messages[0].content }}{{ bos_token }}{{ more }}", bos_token="<s>", eos_token="")  # noqa: S106  # a token of text
    told = {"messages": [{"content": "evil"}], "bos_token": "evil", "more": "!", "tools": "x"}
    assert template.render([{"content": "x"}], add_generation_prompt=True, keywords=told) == "x<s>!"


async def test_the_clients_say_effort_and_verbosity():
    control = answering("ok")
    async with client_of(app_over(control, tokenizer=THINKS)) as client:
        await client.chat.completions.create(
            model="toy", messages=[USER], reasoning_effort="low", verbosity="low", prompt_cache_retention="24h"
        )
        await client.responses.create(model="toy", input="x", reasoning={"effort": "low"}, truncation="auto")
        with pytest.raises(openai.BadRequestError, match="verbosity"):
            await client.chat.completions.create(model="toy", messages=[USER], extra_body={"verbosity": "much"})
    assert [TOKENIZER.decode(one.prompt, skip_special=False) for one in control.submits] == [
        "user:x|effort=low|<|start|>"
    ] * 2


async def test_an_older_client_s_output_format_is_a_schema():
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "schema": schema}
    control = answering('{"a": true}')
    asked: Any = {"model": "toy", "max_tokens": 50, "messages": [USER]}
    async with anthropic_of(app_over(control)) as client:
        await client.messages.create(**asked, extra_body={"output_format": form})
        await client.messages.create(**asked, output_config={"format": form})
        assert control.submits[0].grammar is not None
        assert control.submits[0].grammar == control.submits[1].grammar
        both = {"output_format": form, "output_config": {"format": form}}
        with pytest.raises(Exception, match="send one of them"):
            await client.messages.create(**asked, extra_body=both)


@pytest.mark.parametrize(
    ("kind", "says"),
    [("custom", "free text"), ("web_search", "run on a server"), ("apply_patch", "runs at the client")],
)
async def test_tools_of_other_kinds_are_refused_in_their_own_words_on_the_chat_route(kind, says):
    answer, _ = await post("/v1/chat/completions", {"tools": [{"type": kind, kind: {"name": "x"}}]})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "tools.0.type"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_what_asks_for_nothing_is_taken_where_nothing_is_generated(path):
    body: Any = {"prompt": "x"} if path == "/tokenize" else {"tokens": [120]}
    idle = {"continue_final_message": False, "chat_template": None, "mm_processor_kwargs": None, "priority": 0}
    async with serving(app_over(answering("ok"))) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.post(path, json=body | idle)).status_code == 200
        assert (await client.post(path, json=body | {"continue_final_message": True})).status_code == 400


def name_warned(answer: httpx.Response) -> list[str]:
    """The fields that an answer's warnings name."""
    return [text.split("'")[1] for text in answer.json().get("warnings", [])]


OF_ALL = {"service_tier": "flex", "safety_identifier": "b", "prompt_cache_key": "c", "cache_control": {"type": "x"}}


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        *((path, OF_ALL, list(OF_ALL)) for path in ROUTES),
        *((path, {"store": False, "service_tier": "auto", "truncation": "auto"}, []) for path in ROUTES),
        ("/v1/chat/completions", {"verbosity": "low", "store": True}, ["store", "verbosity"]),
        ("/v1/chat/completions", {"reasoning_effort": "low"}, ["reasoning_effort"]),
        ("/v1/responses", {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}},
         ["reasoning.effort", "text.verbosity"]),
        ("/v1/responses", {"include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}}, ["include"]),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}},
         ["thinking.budget_tokens", "output_config.effort", "thinking"]),
        ("/v1/messages", {"context_management": {"edits": []}, "speed": "fast"}, ["context_management", "speed"]),
        ("/v1/messages", {"chat_template_kwargs": {"a": 1}}, ["chat_template_kwargs.a"]),
    ],
)  # fmt: skip
async def test_what_is_taken_and_changes_nothing_is_named(path, fields, names):
    answer, _ = await post(path, fields)
    assert (answer.status_code, name_warned(answer)) == (200, names)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}}),
        ("/v1/responses", {"reasoning": {"effort": "none"}}),
        ("/v1/messages", {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}),
    ],
)
async def test_what_the_template_looks_at_is_not_named(path, fields):
    answer, _ = await post(path, fields, THINKS)
    assert (answer.status_code, name_warned(answer)) == (200, [])
