"""Costs as they turned out to be while serving, beside those that were measured alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.planning.source import DeviceSource
from policies.planning.plan import Device, Inventory, Option, Role, Shard

Key = tuple[str, str, str, int]
Corrections = Mapping[Key, float]
"""By profile, runtime, weights and threads of a target: measured time over predicted time."""


def key_of(one: Shard | Option) -> Key:
    """Return what a correction is known by."""
    return (one.profile, one.runtime, one.weights, one.threads)


def correct_costs(cluster: Inventory, corrections: Corrections) -> Inventory:
    """Return the cluster with the targets' costs multiplied by what they turned out to be."""
    options = tuple(
        scale_option(one, corrections[key_of(one)]) if one.role is Role.TARGET and key_of(one) in corrections else one
        for one in cluster.options
    )
    return replace(cluster, options=options)


def apply_health(
    cluster: Inventory, behind: Mapping[str, DeviceSource], health: Mapping[str, tuple[float, str]]
) -> Inventory:
    """Return the cluster with the health of its devices: a share of 1 and a reason, by host or by "HOST/DEVICE" with
    the device's name in any of its runtimes."""
    runtimes = {one.runtime for one in cluster.options}

    def judge(device: Device) -> Device:
        names = {device.id, device.host} | {
            f"{device.host}/{behind[device.profile].device_for(runtime)}" for runtime in runtimes
        }
        found = min((health[name] for name in names & health.keys()), default=(1.0, ""))
        return replace(device, health=found[0], health_why=found[1])

    return replace(cluster, devices=tuple(judge(one) for one in cluster.devices))


def scale_option(one: Option, factor: float) -> Option:
    """Return an option that takes so many times as long."""
    return replace(
        one,
        cost=one.cost.scale_by(factor),
        overhead_ms=factor * one.overhead_ms,
        overhead_sequence_ms=factor * one.overhead_sequence_ms,
    )
