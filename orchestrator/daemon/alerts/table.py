"""All alerts. Prometheus rules, their tests, the runbook and the daemon's own watch are made of this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestrator.daemon.alerts.expressions import Absent, Condition, Labels, Ratio, Read

RUNBOOK = "docs/runbook.md"
_5_MIN, _10_MIN, _30_MIN = 300.0, 600.0, 1800.0  # what their names say
_MODEL = ("model_name",)
_DRAFTER = ("model_name", "drafter")


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert. It fires for each set of the labels `by` for which all `conditions` hold for `for_s`. `meaning` and
    `not_meaning` are for whoever it wakes; `look` is the first look, and `remedy` what usually helps."""

    name: str
    by: Labels
    conditions: tuple[Condition | Absent, ...]
    for_s: float
    severity: Literal["info", "warning", "critical"]
    meaning: str
    not_meaning: str
    look: str
    remedy: str

    def tell(self, time_factor: float = 1.0) -> str:
        """Return it in PromQL."""
        return "\nand\n".join(condition.tell(self.by, time_factor) for condition in self.conditions)

    @property
    def runbook(self) -> str:
        """Where the runbook tells of it."""
        return f"{RUNBOOK}#{self.name.lower()}"

    def annotate(self) -> dict[str, str]:
        """Return the annotations."""
        return {
            "summary": self.meaning,
            "description": f"It does not mean: {self.not_meaning} First look: {self.look} Remedy: {self.remedy}",
            "runbook_url": self.runbook,
        }


_DRAFTED = Read("outrider_drafter_draft_tokens_total", _5_MIN)
ACCEPTANCE = Ratio(Read("outrider_drafter_accepted_tokens_total", _5_MIN), _DRAFTED)
ENOUGH_DRAFTED = Condition(_DRAFTED, ">", 1.0)
_SPECULATING = Read("outrider_speculation_seconds_total", _5_MIN)
SPECULATION_COST = Ratio(_SPECULATING, Read("outrider_speculation_plain_seconds_total", _5_MIN))
_DRAFTING = Read("outrider_drafter_seconds_total", _5_MIN)
DRAFTING_COST = Ratio(_DRAFTING, Read("outrider_drafter_saved_seconds_total", _5_MIN))
_BUDGET = Read("outrider_slo_error_budget", fold="max")


def _count_missed(over_s: float) -> Ratio:
    return Ratio(Read("outrider_slo_requests_missed_total", over_s), Read("outrider_slo_requests_judged_total", over_s))


MISSED = _count_missed(_5_MIN)

ALERTS = (
    Alert(
        "OutriderAbsent",
        (),
        (Absent("outrider_num_requests_running"),),
        60.0,
        "critical",
        "No worker of any model was ready since the daemon started, or Prometheus gets no metrics of Outrider.",
        "that running streams are lost: they wait for the next worker.",
        "`outrider status`; on Prometheus' side its page of targets, for a wrong key or address.",
        "Start the daemon. Where a model fails to load, `outrider doctor` says why.",
    ),
    Alert(
        "OutriderAcceptanceFell",
        _DRAFTER,
        (
            Condition(ACCEPTANCE, "<", 0.6, Read("outrider_drafter_usual_acceptance_rate", fold="max")),
            ENOUGH_DRAFTED,
        ),
        300.0,
        "warning",
        "A drafter's tokens are accepted less than 60 % as often as they were.",
        "wrong output: drafts never change it. Requests of another kind may be all that changed.",
        "`outrider status`, which names classes of requests with low acceptance and the likely cause.",
        "Compare the draft's model and vocabulary with the target's; distill or replace the draft.",
    ),
    Alert(
        "OutriderAcceptanceLow",
        _DRAFTER,
        (Condition(ACCEPTANCE, "<", 0.6), ENOUGH_DRAFTED),
        600.0,
        "info",
        "Less than 60 % of a drafter's tokens are accepted.",
        "that speculation costs time: short or cheap drafts pay with far less.",
        "OutriderSpeculationSlower and OutriderDraftingCostsMore: where both are silent, it pays.",
        "`outrider bench pairs` compares drafts; see docs/drafts.md#which-draft.",
    ),
    Alert(
        "OutriderSpeculationSlower",
        _MODEL,
        (Condition(SPECULATION_COST, ">", 1.05), Condition(_SPECULATING, ">", 0.05)),
        300.0,
        "warning",
        "Rounds with drafts take more than 5 % longer than plain rounds would for the same tokens.",
        "that output is wrong. The depth policy pauses what does not pay, except at a fixed depth.",
        "`outrider speculation status` and `outrider status`: is a depth fixed, and by whom?",
        "Take a fixed depth back, or turn speculation off until the draft is better.",
    ),
    Alert(
        "OutriderDraftingCostsMore",
        _DRAFTER,
        (Condition(DRAFTING_COST, ">", 1.0), Condition(_DRAFTING, ">", 0.02)),
        300.0,
        "warning",
        "A drafter takes more time than its accepted tokens save.",
        "that speculation as a whole is slower: another drafter of the chain may make up for it.",
        "`outrider status`: the drafter's device, its share of time and its acceptance.",
        "Give it another device or core, a smaller model, or remove it from `drafts`.",
    ),
    Alert(
        "OutriderClassChanged",
        _MODEL,
        (Condition(Read("outrider_class_changes_total", _10_MIN), ">", 0.0),),
        0.0,
        "warning",
        "A replica began to serve with other last bits than the replica before it.",
        "worse output: both are the target's, and each is exact in its own numerical class.",
        "`outrider status`: numerical class, device and driver of each replica; the log says when it changed.",
        "Where answers must stay the same to the bit, bring back the device, driver or runtime from before.",
    ),
    Alert(
        "OutriderNotAsConfigured",
        (*_MODEL, "what"),
        (Condition(Read("outrider_effective_state_differs", fold="max"), ">", 0.0),),
        300.0,
        "warning",
        "What runs is not what cluster.yaml says: a drafter failed, an operator's override holds, memory was too "
        "small, a standby with other bits serves, Ray's head is away, or a host of its cluster is lost. The label "
        "`what` says which.",
        "lost requests: all of these still answer. While Ray's head is away no lost worker is replaced.",
        "`outrider status` says what failed and why.",
        "Mend the part, or take the override back with `outrider speculation reset`. With `cluster.head: true` the "
        "head is started again; else do so with `ray start --head`. A lost host comes back by `outrider join` there.",
    ),
    Alert(
        "OutriderReplicaFailed",
        (*_MODEL, "reason"),
        (Condition(Read("outrider_replicas_failed", fold="max"), ">", 0.0),),
        0.0,
        "warning",
        "A planned or configured replica does not serve. The label `reason` says why: `failed`, no worker can work "
        "there; `restarts`, each is lost, or none ever served; `unlike`, its bits or its model are others; `host` or "
        "`server`, what it runs on is away; `slow`, it has been loading for longer than expected. The other replicas "
        "have all requests, and less is served than was planned.",
        "lost requests, while another replica serves. A replica that loads as long as expected is not counted.",
        "`outrider health` names the worker and says why; `outrider plan diff` says what the plan lacks.",
        "Mend what it names. Where `model.alike` is true, tokens that would differ need one precision "
        "(`model.activations`) and one set of library versions. `outrider reload` starts workers anew where a key of "
        "theirs or the model is another one; else restart the daemon.",
    ),
    Alert(
        "OutriderFailover",
        (*_MODEL, "kind"),
        (Condition(Read("outrider_worker_losses_total", _10_MIN), ">", 0.0),),
        0.0,
        "warning",
        "A worker of the target was lost; its streams went on elsewhere, or when it was restarted.",
        "lost tokens or streams.",
        "`outrider status` and the log: the kind of the loss and the restarts.",
        "By kind: `memory`, smaller limits; `device` or `host`, the hardware; `crashed`, the log's last lines.",
    ),
    Alert(
        "OutriderWorkerHung",
        _MODEL,
        (Condition(Read("outrider_worker_losses_total", _10_MIN, (("kind", "hung"),)), ">", 0.0),),
        0.0,
        "critical",
        "A worker had streams and said nothing for so long that it was ended.",
        "that it still hangs: it was replaced.",
        "The log of the worker, and the kernel's: a device that stopped, swapping, a debugger.",
        "`outrider cordon` keeps work away from a device that hangs again.",
    ),
    Alert(
        "OutriderDeviceFault",
        (*_MODEL, "device", "what"),
        (Condition(Read("outrider_device_fault", fold="max"), ">", 0.0),),
        0.0,
        "critical",
        "A device says of itself that it does not work. By the label `what`: `lost`, it is gone or needs a reset; "
        "`memory`, errors of its memory were not corrected since its driver was loaded.",
        "lost streams: where there is another device, they went on there.",
        "`outrider status`, which says why, and `nvidia-smi -q` on its host.",
        "Reset or replace the device. `outrider cordon` keeps work away until then.",
    ),
    Alert(
        "OutriderDeviceSlow",
        (*_MODEL, "device"),
        (Condition(Read("outrider_device_slowed", fold="max"), ">", 0.0),),
        300.0,
        "warning",
        "A device lowers its clocks, for its temperature or its power supply.",
        "that it is at its power limit: under full load that is as it should be.",
        "`outrider status`: its temperature, and why; other replicas get more of the requests meanwhile.",
        "Its cooling, or its power supply.",
    ),
    Alert(
        "OutriderSloBurn",
        (*_MODEL, "objective"),
        (
            Condition(MISSED, ">", 1.5, _BUDGET),
            Condition(_count_missed(_30_MIN), ">", 1.5, _BUDGET),
            Condition(Read("outrider_slo_requests_judged_total", _5_MIN), ">", 0.02),
        ),
        120.0,
        "critical",
        "More than one and a half times as many requests miss an objective as may, over 5 and over 30 minutes.",
        "that requests fail: late ones count as missed, too.",
        "`outrider status`: the SLO actions taken, and why nothing helps where nothing does.",
        "Fewer requests or more replicas; an objective that the hardware can hold (docs/capacity.md).",
    ),
    Alert(
        "OutriderKvPressure",
        (*_MODEL, "engine"),
        (
            Condition(Read("outrider_kv_cache_usage_perc", fold="max"), ">", 0.9),
            Condition(Read("outrider_num_requests_waiting", fold="max"), ">", 0.0),
        ),
        120.0,
        "warning",
        "More than 90 % of the KV cache is in use, and requests wait.",
        "that requests fail. A full cache alone is well used: the prefix cache leaves when somebody needs the room.",
        "`outrider_num_preemptions_total`: whether requests are computed again.",
        "Raise `limits.kv_cache`, lower `limits.max_running`, or add a replica.",
    ),
    Alert(
        "OutriderPredictionsDrift",
        _MODEL,
        (
            Condition(Read("outrider_plan_misprediction_factor", fold="max"), ">", 1.3),
            Condition(Read("outrider_generation_tokens_total", _5_MIN), ">", 1.0),
        ),
        600.0,
        "warning",
        "Rounds take more than 1.3 times as long as the plan predicted, or it predicted more than 1.3 times the time.",
        "that service is slow: the placement may only no longer be the best.",
        "`outrider status`: which profile drifted; `outrider devices`: other programs, heat, power limits.",
        "Measure again with `outrider profile`, on a machine without other load.",
    ),
    Alert(
        "OutriderQuarantine",
        _MODEL,
        (Condition(Read("outrider_quarantined_requests", fold="max"), ">", 0.0),),
        0.0,
        "warning",
        "A request that ended workers, or the daemon, is refused.",
        "that other requests are in danger: that is why it is refused.",
        "`outrider quarantine list`: the cause of the last death.",
        "Report the bug with the log. `outrider quarantine release` lets it run again once the cause is mended.",
    ),
    Alert(
        "OutriderJournalShort",
        (*_MODEL, "kind"),
        (Condition(Read("outrider_journal_problems", fold="max"), ">", 0.0),),
        0.0,
        "critical",
        "The journal cannot keep all answers that clients may resume. The label `kind` says why: `not_written`, "
        "nothing is written; `left_out`, running ones do not fit; `memory`, new ones do not; `reserve`, the disk has "
        "not the room that is to be allocated ahead, and what is there still does.",
        "lost or wrong answers: streams go on. Those of a daemon that dies now could not be resumed.",
        "`outrider status`, which says why, and `df` and `df -i` of the state directory.",
        "Make room on that disk: the journal goes on by itself. Raise `journal.reserve` for `left_out`, "
        "`journal.memory` for `memory`.",
    ),
)

RECORDS = (
    ("outrider:acceptance:ratio", _DRAFTER, ACCEPTANCE),
    ("outrider:speculation_cost:ratio", _MODEL, SPECULATION_COST),
    ("outrider:drafting_cost:ratio", _DRAFTER, DRAFTING_COST),
    ("outrider:slo_missed:ratio", (*_MODEL, "objective"), MISSED),
)
"""Recording rules: their names, labels and figures."""

METRICS = frozenset(read.metric for alert in ALERTS for condition in alert.conditions for read in condition.reads)
"""The samples that alerts read."""
