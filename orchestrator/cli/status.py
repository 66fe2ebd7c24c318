"""What the daemon says of itself, as rows for people. Imports little: `outrider status` is to be there at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from device_profiles.units import human_bytes
from orchestrator.cli.status_lines import pair_gauges, plan_line, speculation_rows, store_line, warning_rows
from orchestrator.machine.cores import spans
from orchestrator.protocol.ready import ENDPOINT

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN_QUEUE = 0.05  # less would read 0.0
MOST_ROWS = 24
"""Of devices, and of hosts: in a table. With --json there are all."""
_UNLOADED_FOR = {"idle": "rest", "room": "another model's room"}


def build_tables(answer: dict[str, Any]) -> Iterator[Table]:
    from rich.table import Table

    from orchestrator.plain_table import add_row

    for target in (answer, *({**answer, **further} for further in answer["models"])):
        whose = f": {target['model']}" if answer["models"] else ""
        table = Table(show_header=False, title=f"outrider {answer['version']}{whose}")
        for row in list_rows(target):
            add_row(table, *row)
        yield table


def list_rows(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what people look for first, then how it runs, then what happened."""
    replicas, gauges = answer["replicas"], answer["gauges"]
    rows = [*_first_rows(answer), *_list_warnings(answer)]
    if answer["slo"]:
        rows += [("objectives", objectives_line(answer["slo"])), ("goodput", goodput_line(answer["slo"]))]
    if len(replicas) > 1:
        rows += [(f"replica {replica['engine']}", replica_line(replica)) for replica in replicas]
    rows += [(f"standby {standby['engine']}", replica_line(standby)) for standby in answer["standbys"]]
    rows += _list_drafters(replicas)
    rows += [(_name_draft(draft, answer["drafts"]), draft_line(draft, answer)) for draft in answer["drafts"]]
    rows += [(f"host {host['name'] or host['host']}", _host_line(host)) for host in answer["hosts"][:MOST_ROWS]]
    rows += _list_rest(len(answer["hosts"]) - MOST_ROWS, "hosts")
    shown = answer["devices"]
    if len(shown) > MOST_ROWS:
        shown = sorted(shown, key=lambda device: -(device["utilisation"] or 0.0))[:MOST_ROWS]
    rows += [(f"device {device['name']}", device_line(device)) for device in shown]
    left_out = answer.get("devices_left_out", 0) + len(answer["devices"]) - len(shown)
    rows += _list_rest(left_out, "devices, less busy")
    rows += _list_parts(answer, {"residency": residency_line, "scaling": scaling_line, "draft_store": draft_store_line})
    rows += _list_parts(answer, {"recent_outputs": recent_outputs_line}, "users' last answers")
    if gauges:
        used = gauges["total_blocks"] - gauges["free_blocks"]
        peak = f"peak {human_bytes(gauges['peak_rss_bytes'])}{_format_planned(replicas)}"
        memory = f"worker{'s' * (len(replicas) > 1)} {human_bytes(gauges['rss_bytes'])}, {peak}"
        rows += [
            ("KV cache", f"{used} of {gauges['total_blocks']} blocks, {gauges['preemptions']} preemptions"),
            ("memory", f"{memory}; drafters {human_bytes(gauges['drafter_bytes'])}"),
        ]
    rows += _list_how_it_runs(answer)
    rows += _list_parts(answer, {"store": store_line, "plan": plan_line})
    rows += _list_parts(answer, {"costs": cost_line}, "cost")
    rows += speculation_rows(answer["speculation"])
    rows += [(f"SLO actions{whose}", gauges["slo"]["why"]) for whose, gauges in pair_gauges(replicas) if gauges["slo"]]
    rows += _list_parts(answer, {"canary": canary_line})
    rows.append(("acceptance rule", acceptance_line(answer["acceptance"], answer["gauges"])))
    routes = ((replica["engine"], replica["last_route"]) for replica in replicas)
    return rows + [(f"last route, replica {engine}", route) for engine, route in routes if route]


def _list_parts(
    answer: dict[str, Any], lines: dict[str, Callable[[dict[str, Any]], str]], title: str = ""
) -> list[tuple[str, str]]:
    return [(title or name.replace("_", " "), line(answer[name])) for name, line in lines.items() if answer.get(name)]


def _first_rows(answer: dict[str, Any]) -> list[tuple[str, str]]:
    detail = f" ({answer['detail']})" if answer["detail"] else ""
    ready, gauges, totals = answer["ready"], answer["gauges"], answer["totals"]
    degraded = ", DEGRADED" if answer["phase"] == "ready" and answer["serving"]["missing"] else ""
    rows = [("state", f"{answer['phase']}{degraded}{detail}"), ("API", answer["api"])]
    if away := answer["cluster_away"]:
        rows.append(("RAY AWAY", f"{away} Workers that run go on; none is started."))
    if (cluster := answer["cluster"]) and cluster["alive"]:
        rows.append(("cluster", cluster_line(cluster)))
    if ready:
        rows.append(("model", ready["model"]))
    rows += speed_rows(answer["speed"])
    if gauges:
        line = f"{gauges['running']} running, {gauges['waiting']} waiting, {answer['streams']} streams"
        rows.append(("requests", line))
    if server := server_part(gauges):
        rows.append(("server", server.removeprefix("; ")))
    if ready:
        rows += [
            ("device", f"{ready['adapter']} {ready['device']}: {ready['device_name']}"),
            *(("", part) for part in (*ready["shards"], ready["split"]) if part),
            ("drafts", drafts_line(ready, totals)),
        ]
    if totals["acceptance_rate"] is not None:
        length = f"{totals['mean_acceptance_length']:.2f} tokens (mean acceptance length)"
        line = f"{totals['acceptance_rate']:.0%} of the draft tokens; a verified draft brings {length}"
        rows.append(("accepted", line))
    rows.append(("generated", f"{totals['generated']} tokens in {totals['rounds']} rounds"))
    rows.append(("running for", f"{answer['uptime_s']:.0f} s, {totals['restarts']} worker restarts"))
    return rows


def cluster_line(cluster: dict[str, Any]) -> str:
    known, lost = ", ".join(cluster["alive"]), ", ".join(cluster["lost"])
    return f"Ray's head at {cluster['address']} knows {known}{f'; LOST {lost}' if lost else ''}"


def speed_rows(speed: dict[str, Any] | None) -> list[tuple[str, str]]:
    if speed is None:
        return []
    line = f"{speed['tokens_per_s']:.1f} tokens/s in the last {speed['window_s']:g} s"
    if speed["stream_tokens_per_s"] is not None:
        line += f"; {speed['stream_tokens_per_s']:.1f} tokens/s within an answer (median)"
    rows = [("speed", line)]
    if speed["ttft_ms"] is not None:
        line = f"{speed['ttft_ms']:.0f} ms (median of the last {speed['requests']} answers)"
        rows.append(("time to first token", line))
    return rows


def drafts_line(ready: dict[str, Any], totals: dict[str, Any]) -> str:
    if not ready["drafters"] or not ready["max_depth"]:
        why = ready["no_drafts"] or "every token is the target's own"
        return f"none: {why}"
    who = ", then ".join(ready["drafters"])
    if ready["fixed_depth"]:
        mean = f", {totals['drafted'] / totals['drafts']:.1f} on the average so far" if totals["drafts"] else ""
        return f"{who}; up to {ready['max_depth']} tokens in every round, as many as it proposes{mean}"
    better = "" if ready["costs_from"].startswith("stored profile") else "; `outrider profile` gives a better start"
    return f"{who}; {ready['starting_depth']:g} tokens at first, then adapts, up to {ready['max_depth']}{better}"


def _list_warnings(answer: dict[str, Any]) -> list[tuple[str, str]]:
    ready, gauges, replicas = answer["ready"], answer["gauges"], answer["replicas"]
    rows = [("REDUCED MEMORY", failed) for failed in (ready["memory_reduced"] if ready else [])]
    bounds = ((whose, gauges["memory_bound"]) for whose, gauges in pair_gauges(replicas))
    rows += [(f"OUT OF MEMORY{whose}", memory_bound_line(bound)) for whose, bound in bounds if bound]
    rows += [("DAMAGED FILE", file) for file in (gauges or {}).get("corrupt", [])]
    rows += warning_rows(replicas)
    rows += [("JOURNAL", problem["text"]) for problem in answer.get("journal", {}).get("problems", [])]
    return rows + [(f"{part['kind']} {part['name']}", health_line(part)) for part in answer["health"]]


def _list_how_it_runs(answer: dict[str, Any]) -> list[tuple[str, str]]:
    ready = answer["ready"]
    rows = [("worker", f"{answer['worker']} (runtime {answer['runtime']})")]
    if not ready:
        return rows
    if len(answer["replicas"]) == 1:
        rows.append(("cores", _cores(ready["cores"])))
    depends = "does not depend on the batch (measured)" if ready["row_invariant"] else "may depend on the batch"
    return [
        *rows,
        ("source", ready["source"]),
        ("precision", _format_precision(ready)),
        ("why this precision", ready["precision_reason"] or "the simulated model has one precision"),
        *([("layers", ready["device_layers"])] if ready["device_layers"] else []),
        ("shapes", _shapes(ready)),
        ("exactness", f"{ready['exactness']}: output {depends}"),
        ("numerical class", f"{ready['numerical_class']}; fingerprint {ready['class_fingerprint'] or 'not measured'}"),
        ("why this class", ready["class_reason"] or "nothing was measured"),
        *(("class not taken", rejected) for rejected in ready["classes_rejected"]),
        ("first costs of rounds", ready["costs_from"]),
        ("branches of drafts", ready["branches"]),
    ]


def _format_precision(state: dict[str, Any]) -> str:
    return f"weights {state['weights']}, activations {state['activations']}, KV cache {state['kv_cache']}"


def _list_rest(count: int, what: str) -> list[tuple[str, str]]:
    return [("...", f"{count} more {what}: --json has all")] if count > 0 else []


def health_line(part: dict[str, Any]) -> str:
    wait = f"; nothing is started there for {part['wait_s']:.0f} s" if part["wait_s"] else ""
    why = f": {part['why']}" if part["why"] else ""
    return f"{part['state'].replace('_', '-').upper()}{why}{wait}"


# Of a device's memory: below it a worker that is started there hardly loads. Not tuned.
_SCARCE_SHARE: Final = 0.1


def device_line(device: dict[str, Any]) -> str:
    parts = []
    if device["ours"] is not None:
        shares = (("ours", device["ours"]), ("other programs", device["others"]), ("idle", device["idle"]))
        parts.append(", ".join(f"{name} {share:.0%}" for name, share in shares))
    elif device["utilisation"] is not None:
        parts.append(f"{device['utilisation']:.0%} busy")
    if total := device["memory_total_bytes"]:
        free, ours = device["memory_free_bytes"], device["memory_ours_bytes"]
        parts.append(f"{human_bytes(free)} of {human_bytes(total)} free, {human_bytes(ours)} held by workers")
        if free < _SCARCE_SHARE * total and (others := total - free - ours) > ours:
            parts.append(f"MEMORY TAKEN: other programs hold {human_bytes(others)}")
    for value, limit, unit in (("temperature_c", "temperature_limit_c", "°C"), ("power_w", "power_limit_w", "W")):
        if device[value] is not None:
            most = f" of {device[limit]:.0f}" if device[limit] else ""
            parts.append(f"{device[value]:.0f}{most} {unit}")
    parts += [f"{device['queue_depth']:.1f} requests wait"] * (device["queue_depth"] >= _SHOWN_QUEUE)
    parts += [f"SLOWS ITSELF DOWN: {device['hot']}"] * bool(device["hot"])
    parts += [f"{device['memory_errors']} memory errors that were not corrected"] * bool(device["memory_errors"])
    parts += [f"DOES NOT WORK: {device['fault']}"] * bool(device["fault"])
    return "; ".join(parts) or "it tells nothing yet"


def scaling_line(scaling: dict[str, Any]) -> str:
    ready = "" if scaling["ready"] == scaling["there"] else f", {scaling['ready']} of them ready"
    line = f"{scaling['there']} replicas{ready}; {scaling['wanted']} wanted, of {scaling['least']} to {scaling['most']}"
    last = f"; last change: {scaling['last']}" if scaling["last"] else ""
    return f"{line}: {scaling['why']}{last}"


def residency_line(residency: dict[str, Any]) -> str:
    why = f" ({residency['why']})" * bool(residency["why"])
    waiting = f", {residency['waiting']} requests wait for it" * bool(residency["waiting"])
    unloads = ", ".join(f"{count} for {_UNLOADED_FOR[reason]}" for reason, count in residency["unloads"].items())
    line = f"{residency['state']}{why}{waiting}; keep {residency['keep']}; loaded {residency['loads']} times"
    return f"{line}, unloaded {unloads or 'never'}"


def draft_store_line(store: dict[str, Any]) -> str:
    whose = "shared by all keys" if store["shared"] else "each key its own"
    lookups = store["hits"] + store["misses"] + store["late"]
    line = f"{store['location']}, {whose}; {store['hits']} of {lookups} lookups found answers"
    line += f", {store['late']} late; {store['written']} answers written, {store['dropped']} dropped"
    if store["state"] == "away":
        return f"AWAY: {store['problem']}; requests go on without it; {line}"
    return f"{line}; last problem: {store['problem']}" if store["problem"] else line


def recent_outputs_line(recent: dict[str, Any]) -> str:
    return f"{recent['tokens']} tokens of {recent['users']} user tags, given to {recent['given']} requests"


def cost_line(costs: dict[str, Any]) -> str:
    """Return what the devices in use cost, and what a million tokens did of late and since the start."""
    unit = f"{costs['currency']} a million tokens"
    late, ever = costs["cost_per_million_tokens"], costs["cost_per_million_tokens_since_start"]
    recent = f"{late:.3g} {unit}" if late is not None else "no tokens"
    whole = f", {ever:.3g} {unit}" if ever is not None else ""
    return (
        f"{costs['price_per_hour']:.3g} {costs['currency']} an hour; {recent} in the last {costs['window_s']:g} s; "
        f"{costs['spent']:.3g} {costs['currency']}{whole} since the start"
    )


def objectives_line(slo: dict[str, Any]) -> str:
    lines = []
    for name, objective in slo["objectives"].items():
        seen = "-" if objective["seen_ms"] is None else f"{objective['seen_ms']:.0f}"
        lines.append(f"{name.upper()} p{objective['percentile']:g} {seen} of {objective['ms']:g} ms")
    return ", ".join(lines)


def goodput_line(slo: dict[str, Any]) -> str:
    ended = slo["met"] + slo["missed"]
    return (
        f"{slo['goodput_per_s']:.2f} requests/s met every objective in the last {slo['window_s']:g} s; "
        f"{slo['met']} of {ended} did since the start"
    )


def _host_line(host: dict[str, Any]) -> str:
    if host["left_out"]:
        return f"LEFT OUT: {host['left_out']}"
    named = ((f"{device['adapter']}:{device['device']}", device["memory_bytes"]) for device in host["devices"])
    devices = ", ".join(f"{name} ({human_bytes(size)})" for name, size in named)
    zone = f", zone {host['zone']}" if host["zone"] else ""
    differs = f"; OTHER VERSIONS, whose bits may differ: {', '.join(host['differs'])}" if host["differs"] else ""
    return f"{host['address']}{zone}, {len(host['cores'])} cores, for {' and '.join(host['roles'])}; {devices}{differs}"


def memory_bound_line(bound: dict[str, Any]) -> str:
    return (
        f"forwards of {bound['rows']} of {bound['most_rows']} rows, {bound['sequences']} sequences at most, "
        f"loosened every {bound['holds_s']:g} s; {bound['last']}"
    )


def canary_line(canary: dict[str, Any]) -> str:
    line = f"{canary['phase'].replace('_', ' ')}; {canary['effective_share']:.1%} of new requests get "
    line += "; ".join(canary["differs"])
    decision = canary["decision"]
    return f"{line}; by the {decision['by']}: {decision['reason']}" if decision else line


def acceptance_line(acceptance: dict[str, Any], gauges: dict[str, Any] | None) -> str:
    """Return the rule of requests that name none, and how far the lossy one goes where it is allowed."""
    if not acceptance["tolerance_allowed"]:
        return f"{acceptance['default']}; tolerance not allowed"
    known = gauges["tolerance_deltas"] if gauges else {}
    learned = [
        f"{known[kind]:.2f} nats {kind}" if kind in known else f"{kind} warming up" for kind in ("sampled", "greedy")
    ]
    if again := gauges["tolerance_recalibrations"] if gauges else 0:
        learned.append(f"learned anew {again} times as acceptance drifted")
    return f"{acceptance['default']}; tolerance allowed (LOSSY): {', '.join(learned)}"


def drafter_line(state: dict[str, Any], counts: dict[str, int] | None = None) -> str:
    """Return what a drafter is and what came of it: accepted of verified tokens, time of a round of drafting. `counts`:
    what it drafted since the daemon started; else since its worker did."""
    counts = counts or state
    what = ""
    if state["source"] and not state["adapter"]:
        brought = f"{state['statistics_accepted']} of {state['statistics_drafted']} tokens that only they said accepted"
        what = f"statistics {state['source']}, {brought}; "
    elif state["source"]:
        what = f"{state['adapter']} {state['device']}, {state['source']}; "
        what += f"{_format_precision(state)}; " if state["weights"] else ""
        what += f"{state['precision_reason']}; " if state["precision_reason"] else ""
        what += f"vocabulary {state['vocabulary']}; " if state["vocabulary"] else ""
    if state["static_widths"]:
        what += f"static forwards of {_join_widths(state['static_widths'])} rows; "
    if state["state"] != "ok":
        what = f"{state['state'].upper()} ({state['reason']}); {what}"
    elif state["rests"]:
        what = f"RESTS ({state['rests']}); {what}"
    elif state["reason"]:
        what = f"without statistics ({state['reason']}); {what}"
    took = f", {state['draft_ms'] / state['rounds']:.1f} ms a round" if state["rounds"] else ""
    return f"{what}{counts['accepted']} of {counts['drafted']} draft tokens accepted{took}{_remote(state['remote'])}"


def _remote(remote: dict[str, Any] | None) -> str:
    """Return how a drafter in another process keeps up; "" for one that is not."""
    if not remote:
        return ""
    ahead = f"; drafts ahead: {remote['ahead_hits']} hits, {remote['ahead_misses']} misses" * remote["runs_ahead"]
    sent, received = human_bytes(remote["sent_bytes"]), human_bytes(remote["received_bytes"])
    late = f"{remote['in_time']} of {remote['asks']} answers in time, {remote['late']} late"
    line = f"; {late}, {remote['answer_ms']:.1f} ms to an answer, connected {remote['connections']} times"
    return f"{line}, link of {remote['rtt_ms']:.1f} ms, {sent} out and {received} in{ahead}"


def replica_line(replica: dict[str, Any]) -> str:
    ready, gauges = replica["ready"], replica["gauges"]
    bits = f", its tokens may differ: {replica['unlike']}" if replica["unlike"] else ""
    standby = f"; STANDS IN{bits}" if replica["standby"] and replica["streams"] else ""
    line = f"{_phase(replica)}{standby}; {replica['worker']}, {replica['totals']['restarts']} restarts; "
    line += f"{replica['streams']} streams, drafts by {replica['draft'] or 'nothing'}"
    if gauges:
        used = gauges["total_blocks"] - gauges["free_blocks"]
        line += f", {gauges['running']} running, {gauges['waiting']} waiting"
        line += f", {used} of {gauges['total_blocks']} KV blocks"
    if ready and ready["adapter"] == ENDPOINT:
        line += f"; {ready['device']}, {ready['device_name']}: {ready['precision_reason']}{server_part(gauges)}"
    elif ready:
        line += f"; {', '.join(filter(None, [*ready['shards'], ready['split']])) or ready['device']}"
        line += f", cores {_cores(ready['cores'])}"
    return f"{line}; {replica['totals']['generated']} tokens"


def server_part(gauges: dict[str, Any] | None) -> str:
    server = gauges["server"] if gauges else None
    if not server:
        return ""
    if server["untold"]:
        return f"; {server['untold']}"
    kv = f", {server['kv_use']:.0%} of its KV cache" if server["kv_use"] >= 0.0 else ""
    others = server["others_running"] + server["others_waiting"]
    return f"; it has {server['running']} running and {server['waiting']} waiting, {others} of them of others{kv}"


def draft_line(draft: dict[str, Any], answer: dict[str, Any]) -> str:
    line = f"{_phase(draft)}; {draft['worker'] or 'no process yet'}, {draft['restarts']} restarts"
    if len(answer["replicas"]) > 1:
        named = {replica["name"]: f"replica {replica['engine']}" for replica in answer["replicas"]}
        places = list(named)  # workers are matched as they come up, people read by number
        targets = sorted(draft["targets"], key=lambda name: places.index(name) if name in named else len(places))
        whom = [named.get(name, name) + " (not connected)" * (name not in draft["connected"]) for name in targets]
        line += f"; for {', '.join(whom) or 'nobody'}"
    if draft["load"]:
        line += f"; busy {draft['load']['busy']:.0%}"
    return f"{line}; cores {_cores(draft['ready']['drafter']['cores'])}" if draft["ready"] else line


def _phase(worker: dict[str, Any]) -> str:
    detail = f" ({worker['detail']})" if worker["detail"] else ""
    return f"{worker['phase'].upper() if worker['phase'] == 'failed' else worker['phase']}{detail}"


def _cores(cores: list[int]) -> str:
    return spans(cores) if cores else "not known"


def _shapes(ready: dict[str, Any]) -> str:
    if not ready["static_widths"]:
        return "dynamic"
    return f"static: forwards of {_join_widths(ready['static_widths'])} rows over {ready['context_tokens']} positions"


def _join_widths(widths: list[int]) -> str:
    return ", ".join(str(width) for width in widths)


def _format_planned(replicas: list[dict[str, Any]]) -> str:
    ready = [replica["ready"] for replica in replicas if replica["ready"]]
    planned = sum(its["planned_memory_bytes"] for its in ready)
    if not planned:
        return ""
    correction = sum(its["planned_memory"].get("correction", 0) for its in ready)
    how = f" ({human_bytes(abs(correction))} {'more' if correction > 0 else 'less'} by the last load)"
    return f" of {human_bytes(planned)} planned{how if correction else ''}"


def _list_drafters(replicas: list[dict[str, Any]]) -> list[tuple[str, str]]:
    rows = []
    known = [replica for replica in replicas if replica["gauges"]]
    for (whose, gauges), replica in zip(pair_gauges(replicas), known, strict=True):
        counts = replica["totals"]["by_drafter"]
        nothing = {"drafted": 0, "accepted": 0}
        for drafter in gauges["drafters"]:
            line = drafter_line(drafter, counts.get(drafter["name"], nothing))
            rows.append((f"drafter {drafter['name']}{whose}", line))
        if grammar := counts.get("grammar"):
            line = f"{grammar['accepted']} of {grammar['drafted']} draft tokens accepted"
            rows.append((f"grammars{whose}", f"{line}, which grammars left no choice about"))
    return rows


def _name_draft(draft: dict[str, Any], drafts: list[dict[str, Any]]) -> str:
    name = f"draft worker {draft['name']}"
    several = sum(other["name"] == draft["name"] for other in drafts) > 1
    return f"{name} number {draft['number']}" if several else name
