"""Stop strings: found in text as it comes, however it is split, and those that are a control token's text."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.daemon.api.port import TokenizerPort


class StopSearch:
    """Cuts text before the first stop string: the one that is complete first, the longest of those that end together.

    Text that could still become a stop string is held back, so nothing that was given out is ever retracted. Places
    count characters. A stop string ends the text only where it ends behind `quiet_end`; it may begin before.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.quiet_end = 0
        self.stop: str | None = None
        self.cut_at = 0

    @property
    def held(self) -> int:
        """How many characters are held back."""
        return len(self._held)

    def push(self, text: str, place: int) -> str:
        """Return what this text, which begins at `place`, makes certain. It goes on where the last one ended. Behind a
        stop string, which is then in `stop` and began at `cut_at`, it is what stands before that."""
        text, place = self._held + text, place - len(self._held)
        matches = [(start + len(stop), start) for stop in self._stops if (start := self._find(text, stop, place)) >= 0]
        if matches:
            end, start = min(matches)
            self.stop, self._held, self.cut_at = text[start:end], "", place + start
            return text[:start]
        keep = measure_begun(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back: the text does not go on."""
        text, self._held = self._held, ""
        return text

    def _find(self, text: str, stop: str, place: int) -> int:
        """Return where a stop string begins that ends behind the quiet text; -1 where none does."""
        return text.find(stop, max(0, self.quiet_end - place - len(stop) + 1))


def measure_begun(text: str, wanted: Sequence[str]) -> int:
    """Return the length of the longest end of the text that begins one of these."""
    longest = min(max((len(each) for each in wanted), default=1) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if any(each.startswith(text[-size:]) for each in wanted)), 0)


def find_control_stops(stops: Sequence[str], tokenizer: TokenizerPort) -> dict[int, str]:
    """Return the stop strings that are a control token's text, by that token. Decoded text never has them."""
    control_stops: dict[int, str] = {}
    for stop in stops:
        ids = tokenizer.encode(stop, special=True)
        if (
            len(ids) == 1
            and not tokenizer.decode(ids)
            and tokenizer.token_bytes(ids[0]).decode("utf-8", "replace") == stop
        ):
            control_stops[ids[0]] = stop
    return control_stops
