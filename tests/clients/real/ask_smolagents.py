"""smolagents: a chat, a stream, a tool that must be called, and a run of an agent that calls tools."""

from __future__ import annotations

import json

from report import API, KEY, MODEL, QUESTION, WEATHER, report
from smolagents import ChatMessage, MessageRole, OpenAIModel, ToolCallingAgent, tool


@tool  # type: ignore[untyped-decorator]
def get_weather(warm: bool) -> str:
    """Weather of a place.

    Args:
        warm: Whether it is warm there.
    """
    return f"rain, {warm}"


model = OpenAIModel(model_id=MODEL, api_base=API, api_key=KEY, temperature=0.0, max_tokens=200)
messages = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": QUESTION}])]
report("chat", model.generate(messages).content)
report("streamed", "".join(delta.content or "" for delta in model.generate_stream(messages)))
made = model.generate(messages, tools_to_call_from=[get_weather])
arguments = made.tool_calls[0].function.arguments
report("call", [made.tool_calls[0].function.name, arguments if isinstance(arguments, dict) else json.loads(arguments)])
agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=2, verbosity_level=0)
report("agent", str(agent.run(WEATHER)))
