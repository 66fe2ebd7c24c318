"""A device has several spellings, and all of them are taken for it and for no other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adapters.names import OWN_ADAPTERS, normalise_device
from device_profiles.device_load import DeviceLoad, find_device_load
from device_profiles.device_names import (
    find_device_name,
    find_index,
    is_processor,
    is_same_device,
    list_rank_devices,
    name_compute_place,
    name_compute_unit,
    split_device,
)

KINDS = st.sampled_from(["CUDA", "GPU", "NPU", "ROCm", "Vulkan", "DirectML", "SIM", "MTL"])
NUMBERS = st.integers(0, 20)
DEVICES = st.tuples(KINDS, NUMBERS)
ADAPTERS = st.sampled_from([*OWN_ADAPTERS, "auto", "of_another_distribution"])


@st.composite
def spellings(draw: st.DrawFn, device: tuple[str, int]) -> str:
    """Draw a spelling: in any case, with any separator, and the first of a kind without its number."""
    kind, number = device
    name = "".join(draw(st.sampled_from([sign.upper(), sign.lower()])) for sign in kind)
    written = [f"{name}{separator}{number}" for separator in ("", ":", ".")]
    return draw(st.sampled_from([*written, *([name] if number == 0 else [])]))


@given(st.data(), DEVICES, DEVICES)
def test_two_spellings_are_the_same_device_where_it_is_one(data: st.DataObject, one, other) -> None:
    first, second = data.draw(spellings(one)), data.draw(spellings(other))
    assert is_same_device(first, second) == is_same_device(second, first) == (one == other)
    assert (name_compute_place(f"h/{first}") == name_compute_place(f"h/{second}")) == (one == other)
    assert name_compute_place(f"h/{first}") != name_compute_place(f"i/{second}")


@given(st.data(), DEVICES)
def test_a_spelling_tells_kind_and_number(data: st.DataObject, device) -> None:
    written = data.draw(spellings(device))
    assert (split_device(written)[0], find_index(written)) == (device[0].casefold(), device[1])
    assert not is_processor(written)


@given(st.data(), DEVICES, ADAPTERS)
def test_what_a_runtime_calls_a_device_is_a_spelling_of_it(data: st.DataObject, device, adapter) -> None:
    written = data.draw(spellings(device))
    spelt = normalise_device(adapter, written)
    assert is_same_device(spelt, written)
    assert normalise_device(adapter, spelt) == spelt


@given(st.text(max_size=12), ADAPTERS)
def test_any_text_keeps_its_device_however_it_is_spelt(text: str, adapter: str) -> None:
    assert is_same_device(normalise_device(adapter, text), text)
    assert name_compute_unit(name_compute_unit(text)) == name_compute_unit(text)


@given(st.data(), st.lists(DEVICES, unique=True, min_size=1, max_size=5))
def test_a_device_is_found_among_those_that_a_runtime_lists(data: st.DataObject, devices) -> None:
    listed = [data.draw(spellings(device)) for device in devices]
    for device, name in zip(devices, listed, strict=True):
        assert find_device_name(data.draw(spellings(device)), listed) == name
        assert find_device_name(name, listed) == name
    assert find_device_name("FPGA:0", listed) is None


def test_a_devices_very_own_name_goes_before_other_spellings() -> None:
    assert find_device_name("GPU", ["GPU.0", "GPU"]) == "GPU"


@given(st.data(), DEVICES, st.integers(1, 8))
def test_ranks_have_a_device_each_from_the_named_one_on(data: st.DataObject, device, count: int) -> None:
    names = list_rank_devices(data.draw(spellings(device)), count)
    assert [find_index(name) for name in names] == list(range(device[1], device[1] + count))
    assert len(set(map(name_compute_unit, names))) == count


def test_ranks_on_a_processor_share_it() -> None:
    assert list_rank_devices("CPU", 3) == ["CPU", "CPU", "CPU"]


@given(st.data(), NUMBERS)
def test_the_load_of_a_device_is_found_by_each_of_its_names(data: st.DataObject, number: int) -> None:
    loads = {f"h/CUDA:{other}": DeviceLoad(utilisation=other / 20) for other in range(21)} | {"h/CPU": DeviceLoad()}
    load = find_device_load(loads, f"h/{data.draw(spellings(('CUDA', number)))}")
    assert load is loads[f"h/CUDA:{number}"]
    assert find_device_load(loads, "h/cpu") is loads["h/CPU"]
