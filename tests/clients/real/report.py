"""What the programs of this directory share: where they ask, and how they say what came."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

URL, MODEL = (sys.argv[1], sys.argv[2]) if len(sys.argv) > 2 else ("", "")
API = f"{URL}/v1"
# Libraries look for a key even where none is needed.
os.environ["OPENAI_API_KEY"] = KEY = "none"
QUESTION = "Name a sea."
WEATHER = "What is the weather in Oslo?"
MAX_TOKENS = 40


def report(name: str, value: Any) -> None:
    """Print what a client made of an answer, as one line of JSON."""
    print("RESULT", json.dumps({"name": name, "value": value}), flush=True)  # noqa: T201
