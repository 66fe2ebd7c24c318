"""Chat templates are programs from outside: they are run in the sandbox, where one that goes on for ever is ended."""

from __future__ import annotations

import pickle
from typing import Any

from adapters.chat_template import ChatTemplate, TemplateEnded, TemplateError
from orchestrator.daemon.sandbox.children import JobEnded
from orchestrator.daemon.sandbox.sandbox import JobRefused, Sandbox


class SandboxedTemplate(ChatTemplate):
    """A chat template that is rendered elsewhere; all else of it is as before."""

    def __init__(self, template: ChatTemplate, sandbox: Sandbox) -> None:
        self.__dict__.update(template.__dict__)
        self._pickled = pickle.dumps(template)
        self._sandbox = sandbox

    def render(self, *arguments: Any, **named: Any) -> str:
        """See ChatTemplate. Raises TemplateEnded, and RequestError 503 as Sandbox.do does."""
        timeout_s = self._sandbox.template_timeout_s
        try:
            return self._sandbox.do("template", (self._pickled, arguments, named), timeout_s)
        except JobRefused as refusal:
            raise TemplateError(str(refusal)) from None
        except JobEnded as end:
            why = f"takes longer than {timeout_s:g} s" if end.too_slow else "takes more memory than it may have"
            raise TemplateEnded(f"the model's chat template {why}, and was ended") from None
