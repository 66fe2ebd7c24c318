"""LiteLLM's proxy: started before the daemon, asked by OpenAI's and Anthropic's routes."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from openai import OpenAI
from report import API, KEY, MAX_TOKENS, MODEL, QUESTION, WEATHER, report

START_S = 300.0
PROXY_KEY = f"sk-{secrets.token_hex(24)}"  # it refuses to start without one
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"salty": {"type": "boolean"}},
    "required": ["salty"],
    "additionalProperties": False,
}


def main() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with TemporaryDirectory() as directory:
        config = Path(directory) / "config.yaml"
        parameters = {"model": f"openai/{MODEL}", "api_base": API, "api_key": KEY}
        models = [{"model_name": "sea", "litellm_params": parameters}]
        config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": PROXY_KEY}}))
        program = str(Path(sys.executable).with_name("litellm"))
        with subprocess.Popen([program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]) as proxy:
            try:
                url = f"http://127.0.0.1:{port}"
                wait_ready(url, proxy)
                ask(url)
            finally:
                proxy.terminate()


def wait_ready(url: str, proxy: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            httpx.get(f"{url}/health/liveliness").raise_for_status()
            return
        except httpx.HTTPError:
            assert time.monotonic() < deadline
            assert proxy.poll() is None
            time.sleep(1)


def ask(url: str) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    client: Any = OpenAI(base_url=f"{url}/v1", api_key=PROXY_KEY, timeout=300)
    asked: dict[str, Any] = {"model": "sea", "messages": messages, "temperature": 0.0}
    short = asked | {"max_tokens": MAX_TOKENS}
    report("chat", client.chat.completions.create(**short).choices[0].message.content)
    chunks = client.chat.completions.create(**short, stream=True)
    report("chat streamed", "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
    form = {"type": "json_schema", "json_schema": {"name": "sea", "schema": SCHEMA, "strict": True}}
    made = client.chat.completions.create(**asked, response_format=form)
    report("object", json.loads(made.choices[0].message.content or ""))
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
    called = client.chat.completions.create(
        **asked | {"messages": [{"role": "user", "content": WEATHER}]}, tools=tools, tool_choice="required"
    )
    calls: Any = called.choices[0].message.tool_calls
    report("call", [calls[0].function.name, json.loads(calls[0].function.arguments)])
    response = client.responses.create(model="sea", input=QUESTION, max_output_tokens=MAX_TOKENS, temperature=0.0)
    report("responses", response.output_text)
    body = {"model": "sea", "max_tokens": MAX_TOKENS, "messages": messages, "temperature": 0.0}
    message = httpx.post(f"{url}/v1/messages", json=body, headers={"x-api-key": PROXY_KEY}, timeout=300).json()
    report("messages", message["content"][0]["text"])


main()
