"""Requests to Submit, with their answers' grammar and acceptance rule. Pure; refusals are RequestErrors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from adapters.chat_template import TemplateEnded, is_failure
from adapters.contract import AdapterError
from adapters.tokenizer import Tokenizer
from orchestrator.daemon.api import wire
from orchestrator.daemon.api.conversation import Message, Prediction, Tool, render_tool_messages
from orchestrator.daemon.api.schemas.prepare import PreparedSchema, prepare_schema
from orchestrator.daemon.api.schemas.walk import Node, SchemaRefused
from orchestrator.daemon.api.streaming import find_control_stops
from orchestrator.daemon.api.tools.forms import choose_call_form
from orchestrator.daemon.api.tools.grammar import GrammarText, can_write, choose_writer
from orchestrator.errors import ContextExceeded, RequestError
from orchestrator.protocol.commands import Grammar, Submit
from orchestrator.protocol.packed_tokens import pack_tokens
from policies.sampling import Acceptance, Dry, Sampling
from policies.serving.overrides import Override, Scope

_MASK64 = (1 << 64) - 1
_LAST_CHOICE = -1e9  # beside any logit; what a grammar forbids is below it
_NOT_STRICT = "'strict' is not kept in the form of this model's calls, unless 'tool_choice' asks for a call"
MakeSeed = Callable[[], int]


@dataclass(frozen=True, slots=True)
class AcceptanceBounds:
    """`default`: of requests that name no rule. `tolerance`: they may ask for it. `stores` that they may name."""

    default: Acceptance = "coupled"
    tolerance: bool = False
    stores: tuple[str, ...] = ()

    @property
    def tolerance_allowed(self) -> bool:
        return self.tolerance or self.default == "tolerance"

    def choose_stores(self, names: list[str] | None) -> list[str] | None:
        """Return the stores that a request is drafted from; None for all. Raises RequestError for an unknown one."""
        for name in names or ():
            if name not in self.stores:
                known = f"there are {', '.join(self.stores)}" if self.stores else "there are none"
                raise RequestError(f"there is no store {name!r} of documents: {known}", param="draft_stores")
        return names

    def choose_rule(self, wanted: Acceptance | None) -> Acceptance:
        """Return a request's rule. Raises RequestError where the operator does not allow it."""
        rule = wanted or self.default
        if rule == "tolerance" and not self.tolerance_allowed:
            raise RequestError(
                '\'acceptance\' "tolerance" may change the output and is not allowed here: ask for "coupled" or '
                '"rejection", or the operator for speculation.allow_tolerance',
                param="speculative_config.acceptance",
                code="lossy_not_allowed",
            )
        return rule


@dataclass(frozen=True, slots=True)
class WrittenGrammar:
    """The grammar of an answer; None of one that may be anything. `warnings`: what of the schemas it does not keep."""

    grammar: Grammar | None = None
    warnings: tuple[str, ...] = ()


def write_grammar(
    request: wire.CompletionRequest | wire.ChatRequest,
    most_bytes: int,
    tokenizer: Tokenizer,
    answer_param: str = "response_format",
) -> WrittenGrammar:
    """Return the grammar that a request asks for, its calls in the model's form. `answer_param`: what its route calls
    'response_format'. Raises RequestError for schemas of more than `most_bytes`, and for one that cannot be kept to."""
    _refuse_large(request, most_bytes, answer_param)
    answer = _prepare_answer(request, answer_param)
    if not isinstance(request, wire.ChatRequest) or not request.offered:
        return WrittenGrammar() if answer is None else _write("json_schema", json.dumps(answer.schema), [answer])
    bound = _prepare_tools(_list_bound(request))
    if not bound and answer is None:
        return WrittenGrammar()
    many = request.parallel_tool_calls
    writer = choose_writer(choose_call_form(request, tokenizer), tokenizer)
    tools, prepared = request.forced or request.offered, list(bound.values())
    if writer is not None:
        grammar = GrammarText(writer, tools, _schemas(bound), tokenizer)
        if request.forced:
            return _write("lark", grammar.write_forced(many=many and request.tool_choice == "required"), prepared)
        if answer is not None:
            return _write("lark", grammar.write_calls_or_json(answer.schema, many=many), [answer, *prepared])
        writable = can_write(writer, [tool.function.schema_of_arguments for tool in tools])
        if writable and (text := grammar.write_free(many=many)) is not None:
            return _write("lark", text, prepared)
    return WrittenGrammar(warnings=tuple(f"tool '{name}': {_NOT_STRICT}" for name in bound))


def _write(kind: Literal["json_schema", "lark"], text: str, schemas: Sequence[PreparedSchema]) -> WrittenGrammar:
    return WrittenGrammar(Grammar(kind, text), tuple(warning for schema in schemas for warning in schema.warnings))


def _schemas(bound: dict[str, PreparedSchema]) -> dict[str, Node]:
    return {name: prepared.schema for name, prepared in bound.items()}


def describe_size(what: str, size: int, most_bytes: int, param: str) -> RequestError:
    """Return what refuses a schema or a grammar that is larger than the operator takes."""
    return RequestError(
        f"the {what} has {size} bytes; {most_bytes} are taken: send a smaller one, or ask the operator "
        "for a larger limits.max_grammar",
        code="schema_too_large",
        param=param,
    )


def _refuse_large(request: wire.CompletionRequest | wire.ChatRequest, most_bytes: int, answer_param: str) -> None:
    """Bound what is prepared as what comes of it is bounded."""
    answer = _find_answer(request)
    tools = _list_bound(request) if isinstance(request, wire.ChatRequest) else []
    for what, param, schemas in (
        ("schema", answer_param, [] if answer is None else [answer]),
        ("grammar", "tools", [tool.function.schema_of_arguments for tool in tools]),
    ):
        try:
            size = sum(len(json.dumps(schema)) for schema in schemas)
        except ValueError:  # a number of thousands of digits, which is refused in its own words
            continue
        if size > most_bytes:
            raise describe_size(what, size, most_bytes, param)


def _list_bound(request: wire.ChatRequest) -> Sequence[Tool]:
    return request.forced or [tool for tool in request.offered if tool.function.strict]


def _find_answer(request: wire.CompletionRequest | wire.ChatRequest) -> Node | None:
    return request.response_format.wanted_schema if request.response_format is not None else None


def _prepare_answer(request: wire.CompletionRequest | wire.ChatRequest, param: str) -> PreparedSchema | None:
    schema = _find_answer(request)
    if schema is None:
        return None
    return _prepare(schema, f"'{param}'", f"the schema of '{param}'", param)


def _prepare_tools(tools: Sequence[Tool]) -> dict[str, PreparedSchema]:
    """Return what the arguments of tools must be, by their names: an object, whatever else a schema allows."""
    return {
        name: _prepare(
            function.schema_of_arguments, f"tool '{name}'", f"the schema of the tool '{name}'", "tools", True
        )
        for name, function in ((tool.function.name, tool.function) for tool in tools)
    }


def _prepare(schema: Node, short: str, long: str, param: str, objects: bool = False) -> PreparedSchema:
    try:
        prepared = prepare_schema(schema, objects=objects)
    except SchemaRefused as error:
        raise RequestError(f"{long} cannot be used: {error}", param=param, code="unsupported_schema") from None
    return PreparedSchema(prepared.schema, tuple(f"{short}: {warning}" for warning in prepared.warnings))


@dataclass(frozen=True, slots=True)
class Translation:
    """What requests are translated with. `context_tokens`: the context's length; `make_seed` makes seeds for requests
    that bring none; `bounds`: the rules that they may ask for. `clips`: a limit that the context has no room for means
    the context's, instead of a refusal."""

    request_id: str
    tokenizer: Tokenizer
    context_tokens: int
    make_seed: MakeSeed
    bounds: AcceptanceBounds
    clips: bool = False

    def generation(self, request: wire.CompletionRequest | wire.ChatRequest, written: WrittenGrammar) -> list[Submit]:
        """Translate a request, each of its prompts. `written`: the grammar of its answer. Raises RequestError."""
        stores = self.bounds.choose_stores(request.draft_stores)
        submits = [self.chat(request)] if isinstance(request, wire.ChatRequest) else self.completions(request)
        submits = [_bind_grammar(submit, request, written, self.tokenizer) for submit in submits]
        return submits if stores is None else [msgspec.structs.replace(submit, stores=stores) for submit in submits]

    def completions(self, request: wire.CompletionRequest) -> list[Submit]:
        """Translate `/v1/completions`. Special tokens in a prompt are parsed, but for one that a suffix stands behind.
        Each prompt has the seed that it would have alone. Raises RequestError."""
        submits: list[Submit] = []
        prompts = request.prompts
        for number, given in enumerate(prompts):
            param = "prompt" if len(prompts) == 1 else f"prompt.{number}"
            prompt = _read_prompt(given, self.tokenizer, param, request.suffix)
            wanted = request.max_tokens
            if "max_tokens" not in request.model_fields_set:  # a limit that nobody asked for gives way to the context's
                wanted = min(wanted, max(1, self.context_tokens - len(prompt)))
            _check_fits(len(prompt), wanted, self.context_tokens, param, "max_tokens")
            if not submits:
                submits.append(self._submit(request, prompt, wanted))
                sampling = submits[0].sampling
                continue
            if request.seed is None:
                sampling = replace(sampling, seed=self.make_seed() & _MASK64)
            submits.append(msgspec.structs.replace(submits[0], prompt=prompt, max_tokens=wanted, sampling=sampling))
        return submits

    def chat(self, request: wire.ChatRequest) -> Submit:
        """Translate `/v1/chat/completions`; without a limit the answer may fill the context. Raises RequestError."""
        prompt = prompt_of(request, self.tokenizer)
        limit = request.max_completion_tokens or request.max_tokens
        if self.clips and limit:
            limit = min(limit, max(1, self.context_tokens - len(prompt)))
        bound = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
        _check_fits(len(prompt), limit or 1, self.context_tokens, "messages", bound)
        submit = self._submit(request, prompt, limit or self.context_tokens - len(prompt))
        if request.prediction is None:
            return submit
        prediction = _read_prediction(request.prediction, self.tokenizer, self.context_tokens)
        return msgspec.structs.replace(submit, prediction=prediction)

    def _submit(self, request: wire.CompletionRequest | wire.ChatRequest, prompt: list[int], max_tokens: int) -> Submit:
        sampling = self._sampling(request)
        wrong = next((t for t in request.stop_token_ids if not 0 <= t < self.tokenizer.vocabulary_size), None)
        if wrong is not None:
            raise RequestError(f"stop token {wrong} is outside the vocabulary", param="stop_token_ids")
        if request.min_tokens > max_tokens:
            raise RequestError(
                f"'min_tokens' {request.min_tokens} is above the limit of {max_tokens}", param="min_tokens"
            )
        override = read_override(request.speculative_config, Scope.REQUEST)
        ends = set() if request.ignore_eos else self.tokenizer.eos_ids | _list_fill_ends(request, self.tokenizer)
        control_stops = find_control_stops(request.stops, self.tokenizer)
        return Submit(
            request_id=self.request_id,
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_tokens=sorted({*ends, *request.stop_token_ids, *control_stops}),
            depth=override.depth,
            timeout_s=request.timeout_s or 0.0,
            min_tokens=request.min_tokens,
            logprobs=request.wanted_logprobs,
            prompt_logprobs=isinstance(request, wire.CompletionRequest)
            and request.echo
            and request.logprobs is not None,
            route="/v1/chat/completions" if isinstance(request, wire.ChatRequest) else "/v1/completions",
            user=request.user,
            most_depth=override.most,
            policy_depth=bool(override.enabled),
        )

    def _sampling(self, request: wire.Generation) -> Sampling:
        seed = self.make_seed() if request.seed is None else request.seed
        config = request.speculative_config
        return Sampling(
            temperature=request.temperature,
            # At the vocabulary it keeps every token already, and a larger number may not fit on the wire.
            top_k=min(max(request.top_k, 0), self.tokenizer.vocabulary_size),
            top_p=request.top_p,
            min_p=request.min_p,
            seed=seed & _MASK64,
            logit_bias=_logit_bias(request, self.tokenizer.vocabulary_size),
            repetition_penalty=request.repetition_penalty,
            frequency_penalty=request.frequency_penalty,
            presence_penalty=request.presence_penalty,
            typical_p=request.typical_p,
            xtc_probability=request.xtc_probability if request.excludes_top else 0.0,
            xtc_threshold=request.xtc_threshold,
            dry=_read_dry(request, self.tokenizer),
            acceptance=self.bounds.choose_rule(None if config is None else config.acceptance),
        )


def _read_prediction(prediction: Prediction, tokenizer: Tokenizer, context_tokens: int) -> bytes:
    """Return the expected answer as of packed_tokens. Raises RequestError where no answer can be so long."""
    tokens = tokenizer.encode(prediction.text, special=False)
    if len(tokens) > context_tokens:
        raise ContextExceeded(context_tokens, len(tokens), param="prediction")
    return pack_tokens(tokens)


def prompt_of(request: wire.ChatRequest, tokenizer: Tokenizer) -> list[int]:
    """Return the prompt of a chat as tokens. Raises RequestError."""
    return chat_prompt(request.messages, tokenizer, request.offered, keywords=request.template_keywords)


def list_idle(request: wire.CompletionRequest | wire.ChatRequest, tokenizer: Tokenizer) -> list[str]:
    """Return the fields of a request that this model's template does not look at, and those that no model knows."""
    if not isinstance(request, wire.ChatRequest):
        return []
    template_keywords = request.template_keywords
    idle = set(tokenizer.find_idle_keywords(template_keywords)) if template_keywords else set[str]()
    effort = ["reasoning_effort"] if request.reasoning_effort is not None and "reasoning_effort" in idle else []
    keywords = [f"chat_template_kwargs.{name}" for name in request.chat_template_kwargs if name in idle]
    return [*effort, *keywords, *(["verbosity"] if request.verbosity is not None else [])]


def describe_unused(fields: Sequence[str]) -> list[str]:
    return [f"'{field}' is not used: it cannot change the answer of this model" for field in fields]


def chat_prompt(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Sequence[Tool] = (),
    *,
    add_generation_prompt: bool = True,
    keywords: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return messages as the tokens that the model's chat template makes of them. A template that does not tell of
    tools itself gets them in the messages. `keywords`: what it is told beside. Raises RequestError."""
    if not tokenizer.has_chat_template:
        raise RequestError("this model has no chat template: use /v1/completions", param="messages")
    plain = [message.plain() for message in messages]
    native = [tool.plain() for tool in tools] if tools and tokenizer.template_takes_tools else None
    try:
        if not tokenizer.template_takes_tools:
            plain = render_tool_messages(plain, tools)
        return tokenizer.encode_chat(
            plain, add_generation_prompt=add_generation_prompt, tools=native, keywords=keywords or {}
        )
    except RecursionError:
        raise RequestError("a call's arguments, or a tool, are nested too deep", param="messages") from None
    except AdapterError as error:
        raise RequestError(_explain(error, tokenizer), param="messages") from error


def _explain(error: AdapterError, tokenizer: Tokenizer) -> str:
    """Say whose fault it is that messages cannot be rendered: theirs, or the template's."""
    fault = ""
    if not isinstance(error, TemplateEnded):  # a second try would take as long
        with suppress(AdapterError, RequestError):  # it could not be tried
            fault = tokenizer.template_fault
    if fault:
        return f"this model's chat template itself is at fault, whatever the messages: {fault}. Use /v1/completions"
    return str(error) if is_failure(error) else f"the chat template refuses these messages: {error}"


def _read_prompt(prompt: wire.Prompt, tokenizer: Tokenizer, param: str, suffix: str) -> list[int]:
    """Return a prompt as tokens; with a suffix, that of what stands between the two. Raises RequestError."""
    if not isinstance(prompt, str):
        wrong = next((token for token in prompt if not 0 <= token < tokenizer.vocabulary_size), None)
        if wrong is not None:
            raise RequestError(f"token {wrong} is outside the vocabulary of {tokenizer.vocabulary_size}", param=param)
    if suffix:
        try:
            return tokenizer.encode_fill(prompt, suffix)
        except AdapterError as error:
            raise RequestError(f"{error}: leave 'suffix' out", param="suffix", code="not_supported") from None
    ids = tokenizer.encode_prompt(prompt, special=True) if isinstance(prompt, str) else prompt
    if not ids:
        which = "the prompt" if param == "prompt" else f"'{param}'"
        raise RequestError(f"{which} is empty", param=param)
    return ids


def _list_fill_ends(request: wire.CompletionRequest | wire.ChatRequest, tokenizer: Tokenizer) -> frozenset[int]:
    marks = tokenizer.fill_tokens if isinstance(request, wire.CompletionRequest) and request.suffix else None
    return frozenset() if marks is None else marks.ends


def _check_fits(prompt: int, wanted: int, context: int, param: str, bound: str) -> None:
    """Blame the parameter that is too large: `param` is the prompt's, `bound` that of the answer's length."""
    if prompt >= context:
        raise ContextExceeded(context, prompt, param=param)
    if prompt + wanted > context:
        raise ContextExceeded(context, prompt, param=param, wanted_tokens=wanted, bound=bound)


def _read_dry(request: wire.Generation, tokenizer: Tokenizer) -> Dry | None:
    if not request.dry_multiplier or not request.dry_penalty_last_n:
        return None
    breakers = [breaker for text in request.dry_sequence_breakers for breaker in tokenizer.find_breakers(text)]
    size = sum(len(ids) + len(rest) for ids, rest in breakers)
    if size > wire.MAX_BREAKER_TOKENS:
        why = f"they stand in {size} tokens, and {wire.MAX_BREAKER_TOKENS} are taken: send fewer or shorter ones"
        raise RequestError(f"'dry_sequence_breakers': {why}", param="dry_sequence_breakers")
    return Dry(
        multiplier=request.dry_multiplier,
        base=request.dry_base,
        allowed_length=request.dry_allowed_length,
        last_tokens=request.dry_penalty_last_n,
        breakers=tuple((ids, rest) for ids, rest in breakers if ids),
    )


def _logit_bias(request: wire.Generation, vocabulary_size: int) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for key, bias in request.logit_bias.items():
        if not (key.isdecimal() and key.isascii() and int(key) < vocabulary_size):
            raise RequestError(
                f"'logit_bias' has the key {key!r}: a token id is 0 to {vocabulary_size - 1}", param="logit_bias"
            )
        biases[int(key)] = bias
    return tuple(sorted(biases.items()))


def _bind_grammar(
    submit: Submit, request: wire.CompletionRequest | wire.ChatRequest, written: WrittenGrammar, tokenizer: Tokenizer
) -> Submit:
    """Bind an answer by its grammar. One that ignores the model's end takes it only where nothing else may follow: to
    a grammar it is the end of the text."""
    if written.grammar is None:
        return submit
    sampling = submit.sampling
    if request.ignore_eos:
        ends = dict.fromkeys(tokenizer.eos_ids - set(submit.stop_tokens), _LAST_CHOICE)
        sampling = replace(sampling, logit_bias=tuple(sorted((dict(sampling.logit_bias) | ends).items())))
    return msgspec.structs.replace(submit, grammar=written.grammar, sampling=sampling)


def read_override(config: wire.SpeculativeConfig | None, scope: Scope) -> Override:
    """Return the override that a `speculative_config` asks for. Without a method, fields that it lacks stay open."""
    if config is None:
        return Override(scope)
    if config.method == "off":
        return Override(scope, enabled=False, depth=0)
    depth, most = config.num_speculative_tokens, config.max_speculative_tokens
    return Override(scope, True if "method" in config.model_fields_set else None, depth, most)


def choices(submits: Sequence[Submit], count: int) -> list[Submit]:
    """Return a request for each choice, prompt by prompt. Choice i of a prompt has the seed + i, so that the first is
    what n = 1 gives, and each is what the prompt gives alone."""
    if len(submits) == count == 1:
        return list(submits)
    return [
        msgspec.structs.replace(
            submit,
            request_id=f"{submit.request_id}-{index}",
            sampling=replace(submit.sampling, seed=(submit.sampling.seed + index % count) & _MASK64),
        )
        for index, submit in enumerate(each for each in submits for _ in range(count))
    ]
