"""Energy is read where a machine tells it; where not, there is a reason instead."""

from adapters.energy import energy_meter


def counter(root, name, energy_uj, full_uj=1_000_000_000):
    (root / name).mkdir()
    (root / name / "energy_uj").write_text(f"{energy_uj}\n")
    (root / name / "max_energy_range_uj").write_text(f"{full_uj}\n")
    return root / name / "energy_uj"


def test_rapl_counts_all_packages_and_begins_again_when_it_is_full(tmp_path):
    first, second = counter(tmp_path, "intel-rapl:0", 999_000_000), counter(tmp_path, "intel-rapl:1", 0)
    counter(tmp_path, "intel-rapl:0:0", 5)  # a part of the first package
    meter = energy_meter("cpu", powercap=tmp_path)
    assert (meter.name, meter.joules()) == ("RAPL", 0.0)
    first.write_text("1000000\n")
    second.write_text("3000000\n")
    assert meter.joules() == 2.0 + 3.0


def test_without_counters_there_is_a_reason(tmp_path):
    meter = energy_meter("cpu", powercap=tmp_path)
    assert meter.joules() is None
    assert "RAPL" in meter.reason
    assert energy_meter("npu").joules() is None
