"""DSPy: a question as it is, a signature by its JSON adapter, and a stream of one."""

from __future__ import annotations

import dspy
from report import API, KEY, MODEL, QUESTION, report

lm = dspy.LM(f"openai/{MODEL}", api_base=API, api_key=KEY, temperature=0.0, max_tokens=200, cache=False)
report("text", lm(QUESTION)[0])
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
answer = dspy.Predict("question -> salty: bool, depth_m: int")(question=QUESTION)
report("signature", {"salty": answer.salty, "depth_m": answer.depth_m})
responses = dspy.LM(
    f"openai/{MODEL}", api_base=API, api_key=KEY, temperature=0.0, max_tokens=200, cache=False, model_type="responses"
)
report("responses", str(responses(QUESTION)[0]))
streamed = dspy.streamify(dspy.Predict("question -> salty: bool"), async_streaming=False)
report("streamed", [chunk.salty for chunk in streamed(question=QUESTION) if isinstance(chunk, dspy.Prediction)])
