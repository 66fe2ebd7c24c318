"""LlamaIndex: completions, a chat and its stream, a tool that must be called, an object."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field
from report import API, KEY, MAX_TOKENS, MODEL, QUESTION, WEATHER, report


class Sea(BaseModel):
    """A sea."""

    salty: bool
    depth_m: int = Field(ge=0, le=11_000)  # a small model writes digits for ever


def get_weather(warm: bool) -> str:
    """Weather of a place."""
    return f"rain, {warm}"


options = {"model": MODEL, "api_base": API, "api_key": KEY, "temperature": 0.0, "context_window": 8192}
llm = OpenAILike(**options, max_tokens=MAX_TOKENS, is_chat_model=True, is_function_calling_model=True)
plain = OpenAILike(**options, max_tokens=MAX_TOKENS, is_chat_model=False)
messages = [ChatMessage(role="user", content=QUESTION)]
report("completion", plain.complete("The sea").text)
report("completion streamed", list(plain.stream_complete("The sea"))[-1].text)
report("chat", llm.chat(messages).message.content)
report("chat streamed", list(llm.stream_chat(messages))[-1].message.content)
tool = FunctionTool.from_defaults(fn=get_weather)
called = llm.chat_with_tools([tool], user_msg=WEATHER, tool_required=True)
report("call", [[call.tool_name, call.tool_kwargs] for call in llm.get_tool_calls_from_response(called)])
report("object", llm.structured_predict(Sea, PromptTemplate(QUESTION)).model_dump())
