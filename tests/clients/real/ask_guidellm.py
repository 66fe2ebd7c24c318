"""GuideLLM: two requests, one after the other, over the chat route and over completions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from report import MODEL, QUESTION, URL, report

WANTED_TOKENS = 16


def run(directory: Path, request_format: str) -> None:
    prompts, output = directory / "prompts.jsonl", directory / f"{request_format.strip('/').replace('/', '-')}.json"
    prompts.write_text(f"{json.dumps({'prompt': QUESTION, 'output_tokens_count': WANTED_TOKENS})}\n" * 2)
    command = [
        *(str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={URL},model={MODEL},request_format={request_format}"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=2"),
        *("--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={output}"),
    ]
    subprocess.run(command, check=True)
    requests = json.loads(output.read_text())["benchmarks"][0]["requests"]
    report(f"{request_format} answers", len(requests["successful"]))
    tokens = {each["output_metrics"]["text_tokens"] for each in requests["successful"]}
    report(f"{request_format} tokens", sorted(tokens))


with TemporaryDirectory() as name:
    for route in ("/v1/chat/completions", "/v1/completions"):
        run(Path(name), route)
