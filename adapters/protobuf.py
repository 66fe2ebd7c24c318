"""Reads protocol buffers' wire form: numbered fields, without a schema
(https://protobuf.dev/programming-guides/encoding)."""

from __future__ import annotations

from collections.abc import Iterator

Field = int | memoryview
_FIXED = {1: 8, 5: 4}
"""Kinds of fields that have a fixed length, in bytes."""
_LONGEST = 10
"""Bytes of the longest number."""


def read_fields(data: memoryview) -> Iterator[tuple[int, Field]]:
    """Yield each field's number, and its value: a whole number, or the bytes of what it holds.

    Raises ValueError or IndexError for what is no such message."""
    place = 0
    while place < len(data):
        key, place = _read_number(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _read_number(data, place)
            yield key >> 3, value
            continue
        if kind == 2:
            length, place = _read_number(data, place)
        elif kind in _FIXED:
            length = _FIXED[kind]
        else:
            raise ValueError(f"a field of kind {kind}")
        if place + length > len(data):
            raise ValueError("it ends within a field")
        yield key >> 3, data[place : place + length]
        place += length


def read_numbers(value: Field) -> list[int]:
    """Return the whole numbers of a repeated field: one, or packed ones. Raises ValueError or IndexError."""
    if isinstance(value, int):
        return [value]
    numbers, place = [], 0
    while place < len(value):
        number, place = _read_number(value, place)
        numbers.append(number)
    return numbers


def read_text(value: Field) -> str:
    """Return a field's text. Raises ValueError where it is none."""
    if isinstance(value, int):
        raise ValueError("a number where a text should be")
    return bytes(value).decode()


def _read_number(data: memoryview, place: int) -> tuple[int, int]:
    number = 0
    for index in range(_LONGEST):
        byte = data[place + index]
        number |= (byte & 127) << (7 * index)
        if byte < 128:
            return number, place + index + 1
    raise ValueError("a number without an end")
