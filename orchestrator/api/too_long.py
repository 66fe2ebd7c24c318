"""What does not fit the model's context, in the words that clients look for: they shorten the conversation then."""

from __future__ import annotations

from orchestrator.errors import RequestError

CODE = "context_length_exceeded"


class ContextExceeded(RequestError):
    """A prompt of `prompt_tokens` and an answer of `wanted_tokens` exceed `context_tokens`.

    `param` is what the prompt came in, `bound` what asks for the answer's length, None where that may be as it is.
    `at_least`: the prompt was not counted to its end. Names of parameters are the route's own.
    """

    def __init__(
        self,
        context_tokens: int,
        prompt_tokens: int,
        *,
        param: str,
        wanted_tokens: int = 1,
        bound: str | None = None,
        at_least: bool = False,
    ) -> None:
        self.context_tokens = context_tokens
        self.prompt_tokens = prompt_tokens
        least = "at least " if at_least else ""
        if bound is None:
            told = f"you sent {least}{prompt_tokens} in '{param}', and an answer needs one more: send fewer"
        else:
            most = context_tokens - prompt_tokens
            told = (
                f"you requested {prompt_tokens + wanted_tokens} ({prompt_tokens} in '{param}', and {wanted_tokens} by "
                f"'{bound}', which may be {most} at most)"
            )
        words = f"This model's maximum context length is {context_tokens} tokens. However, {told} ({CODE})"
        super().__init__(words, code=CODE, param=bound or param)

    @property
    def anthropic_words(self) -> str:
        """The same in the words of Anthropic's API. One token is the answer's at the least."""
        return f"prompt is too long: {self.prompt_tokens} tokens > {self.context_tokens - 1} maximum"
