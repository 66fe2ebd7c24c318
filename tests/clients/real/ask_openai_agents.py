"""openai-agents: runs with a tool that must be called, with an output type, and streamed, over both of its models."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from report import API, KEY, MODEL, QUESTION, WEATHER, report

ROOM = 1000  # an answer that a limit cuts off is an error for this client
CALLS: list[str] = []


class Sea(BaseModel):
    """A sea."""

    salty: bool
    depth_m: int = Field(ge=0, le=11_000)  # a small model writes digits for ever


@function_tool  # type: ignore[untyped-decorator]
def get_weather(warm: bool) -> str:
    """Weather of a place."""
    CALLS.append(str(warm))
    return "rain"


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=API, api_key=KEY)
    for kind, model in (
        ("chat", OpenAIChatCompletionsModel(model=MODEL, openai_client=client)),
        ("responses", OpenAIResponsesModel(model=MODEL, openai_client=client)),
    ):
        settings = ModelSettings(max_tokens=ROOM, temperature=0.0)
        agent = Agent(name="seas", model=model, model_settings=settings)
        report(f"{kind} whole", (await Runner.run(agent, QUESTION)).final_output)
        streamed = Runner.run_streamed(agent, QUESTION)
        events = [event.type async for event in streamed.stream_events()]
        report(f"{kind} streamed", streamed.final_output)
        report(f"{kind} events", len(events))
        typed = Agent(name="seas", model=model, model_settings=settings, output_type=Sea)
        report(f"{kind} output type", (await Runner.run(typed, QUESTION)).final_output.model_dump())
        CALLS.clear()
        must = ModelSettings(max_tokens=ROOM, temperature=0.0, tool_choice="required")
        caller = Agent(name="weather", model=model, model_settings=must, tools=[get_weather])
        report(f"{kind} with a tool", (await Runner.run(caller, WEATHER)).final_output)
        report(f"{kind} calls", len(CALLS))


asyncio.run(main())
