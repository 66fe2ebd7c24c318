"""The screen of `outrider top`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.markup import escape
from textual.widgets import DataTable, Footer, Input, Static

from orchestrator.cli.daemon_socket import StatusError
from orchestrator.cli.top_rows import DEVICES, DRAFTS, REPLICAS, REQUESTS, Cell, Column, History, choose_rows

_TABLES = {
    "replicas": (REPLICAS, History.list_replicas),
    "drafts": (DRAFTS, History.list_drafts),
    "requests": (REQUESTS, History.list_requests),
    "devices": (DEVICES, History.list_devices),
}


class FleetTable(DataTable[Text]):
    """A table that keeps its place, its order and what it leaves out while its rows change."""

    def __init__(self, name: str, columns: tuple[Column, ...]) -> None:
        super().__init__(id=name, cursor_type="row", zebra_stripes=True)
        self.border_title = name
        self._shown = columns
        self._rows: list[list[Cell]] = []
        self.sort_by = 0
        self.descending = False
        self.filter_text = ""

    def on_mount(self) -> None:
        for column in self._shown:
            self.add_column(column.name)

    def show(self, rows: list[list[Cell]]) -> None:
        self._rows = rows
        self.refresh_rows()

    def turn_sort(self, *, reverse: bool) -> None:
        if reverse:
            self.descending = not self.descending
        else:
            self.sort_by = (self.sort_by + 1) % len(self._shown)
            sample = next((row[self.sort_by] for row in self._rows if row[self.sort_by] is not None), "")
            self.descending = not isinstance(sample, str)  # of numbers the largest first
        self.refresh_rows()

    def refresh_rows(self) -> None:
        at = self.cursor_row
        current = str(self.get_row_at(at)[0]) if self.is_valid_row_index(at) else ""
        chosen = choose_rows(self._rows, self._shown, self.filter_text, self.sort_by, descending=self.descending)
        self.clear()
        for row in chosen:
            self.add_row(*map(Text, row))
        names = [row[0] for row in chosen]
        self.move_cursor(row=names.index(current) if current in names else 0)
        order = f"{self._shown[self.sort_by].name} {'↓' if self.descending else '↑'}"
        kept = f", {len(chosen)} of {len(self._rows)} with '{escape(self.filter_text)}'" if self.filter_text else ""
        self.border_title = f"{self.id}, by {order}{kept}"


class TopApp(App[None]):
    """Replicas, drafts, requests and devices of one daemon. `ask` returns its status, with its live `requests`. It may
    block, and raise StatusError."""

    TITLE = "outrider top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #summary { height: auto; padding: 0 1; }
    #away { height: auto; padding: 0 1; color: $error; display: none; }
    #away.on { display: block; }
    DataTable { height: 1fr; border: round $primary; }
    DataTable:focus { border: round $accent; }
    #filter { display: none; }
    #filter.on { display: block; }
    """
    BINDINGS: ClassVar = [
        Binding("q", "quit", "Quit"),
        Binding("s", "sort(False)", "Sort by next column"),
        Binding("r", "sort(True)", "Reverse"),
        Binding("slash", "filter", "Filter"),
        Binding("escape", "clear_filter", "All rows"),
        Binding("tab", "focus_next", "Next table", show=True),
    ]

    def __init__(self, ask: Callable[[], dict[str, Any]], interval_s: float) -> None:
        super().__init__()
        self._ask = ask
        self._interval_s = interval_s
        self._history = History()

    def compose(self) -> ComposeResult:
        yield Static("asks the daemon ...", id="summary", markup=False)
        yield Static("", id="away", markup=False)
        with Vertical():
            for name, (columns, _) in _TABLES.items():
                yield FleetTable(name, columns)
        yield Input(placeholder="part of a name, a state, a device: Enter keeps it, Escape shows all", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#replicas").focus()
        self.run_worker(self._watch(), exclusive=True, name="watch the daemon")

    async def _watch(self) -> None:
        while True:
            try:
                status = await asyncio.to_thread(self._ask)
            except StatusError as error:
                self._tell_away(f"{time.strftime('%H:%M:%S')}: {error}")
            else:
                self._tell_away("")
                self._history.add(time.monotonic(), status)
                self._show()
            await asyncio.sleep(self._interval_s)

    def _show(self) -> None:
        self.query_one("#summary", Static).update(self._history.format_summary())
        for name, (_, list_rows) in _TABLES.items():
            self.query_one(f"#{name}", FleetTable).show(list_rows(self._history))

    def _tell_away(self, text: str) -> None:
        away = self.query_one("#away", Static)
        away.update(text)
        away.set_class(bool(text), "on")

    @property
    def table(self) -> FleetTable:
        """The table that keys are for: the one with the focus, else the first."""
        return self.focused if isinstance(self.focused, FleetTable) else self.query(FleetTable).first()

    def action_sort(self, reverse: bool) -> None:
        """Sort the table by its next column, or the other way round."""
        self.table.turn_sort(reverse=reverse)

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.add_class("on")
        field.focus()

    def action_clear_filter(self) -> None:
        self.query_one("#filter", Input).value = ""
        self._leave_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        for table in self.query(FleetTable):
            table.filter_text = event.value
            table.refresh_rows()

    def on_input_submitted(self) -> None:
        self._leave_filter()

    def _leave_filter(self) -> None:
        self.query_one("#filter", Input).remove_class("on")
        self.query_one("#replicas").focus()
