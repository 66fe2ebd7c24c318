"""instructor: an object by a tool, by a schema and from partial answers."""

from __future__ import annotations

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field
from report import API, KEY, MODEL, QUESTION, report


class Sea(BaseModel):
    """A sea."""

    salty: bool
    depth_m: int = Field(ge=0, le=11_000)  # a small model writes digits for ever


request = {"model": MODEL, "max_tokens": 200, "temperature": 0.0, "messages": [{"role": "user", "content": QUESTION}]}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(OpenAI(base_url=API, api_key=KEY), mode=mode)
    if mode is instructor.Mode.JSON:  # the model is told the schema and held to JSON alone: not every one keeps to it
        raw = client.client.chat.completions.create(**request, response_format={"type": "json_object"})
        report(f"{mode.name} object", raw.choices[0].message.content[:1])
        continue
    report(f"{mode.name} object", client.create(response_model=Sea, **request).model_dump())
    last = list(client.create_partial(response_model=Sea, **request))[-1]
    report(f"{mode.name} partial", last.model_dump())
client = instructor.from_openai(OpenAI(base_url=API, api_key=KEY), mode=instructor.Mode.RESPONSES_TOOLS)
fields = {key: value for key, value in request.items() if key != "max_tokens"}
report("RESPONSES_TOOLS object", client.create(response_model=Sea, **fields).model_dump())
