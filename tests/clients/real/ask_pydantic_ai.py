"""pydantic-ai: a chat, whole and streamed, output by a schema and by a tool, and a tool that must be called."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ModelRequest, ToolCallPart, UserPromptPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition
from report import API, KEY, MAX_TOKENS, MODEL, QUESTION, WEATHER, report


class Sea(BaseModel):
    """A sea."""

    salty: bool
    depth_m: int = Field(ge=0, le=11_000)  # a small model writes digits for ever


async def main() -> None:
    provider = OpenAIProvider(base_url=API, api_key=KEY)
    settings = {"max_tokens": MAX_TOKENS, "temperature": 0.0}
    for kind, model in (
        ("chat", OpenAIChatModel(MODEL, provider=provider, settings=settings)),
        ("responses", OpenAIResponsesModel(MODEL, provider=provider, settings=settings)),
    ):
        agent = Agent(model)
        report(f"{kind} whole", (await agent.run(QUESTION)).output)
        async with agent.run_stream(QUESTION) as streamed:
            report(f"{kind} streamed", await streamed.get_output())
        for form in (NativeOutput, ToolOutput):
            answer = await Agent(model, output_type=form(Sea)).run(QUESTION)
            report(f"{kind} {form.__name__}", answer.output.model_dump())
        tool = ToolDefinition(
            name="get_weather",
            parameters_json_schema={
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                "required": ["city"],
            },
        )
        made = await model.request(
            [ModelRequest(parts=[UserPromptPart(WEATHER)])],
            settings,
            ModelRequestParameters(function_tools=[tool], allow_text_output=False),
        )
        calls = [part for part in made.parts if isinstance(part, ToolCallPart)]
        report(f"{kind} call", [[call.tool_name, call.args_as_dict()] for call in calls])


asyncio.run(main())
