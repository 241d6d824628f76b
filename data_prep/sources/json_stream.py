"""Streaming of a json file: its object's members one by one, with one of them opened into its own members."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.sources.files import damaged, reading

MAX_DEPTH = 8
"""Deepest nesting of a value. Deeper ones are damage; without a limit, a file of brackets exhausts memory."""
PIECE = 1 << 16
SIMPLE = {"number", "string", "boolean", "null"}

Events = Iterator[tuple[str, Any]]


def members(path: Path, opened: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for each member of a file's object; for `opened`, (opened, (key, value)) for each of its own.

    One value at a time is in memory. Integers are int, other numbers float.

    Raises:
        InputError: the file can't be read, is not json, or holds no object; or `opened` is not an object.
    """
    import ijson

    with reading(path), path.open("rb") as file:
        events = iter(ijson.basic_parse(file, use_float=True, buf_size=PIECE))
        try:
            _enter(events)
            for key, event, value in _keys(events):
                if key != opened:
                    yield key, _built(events, event, value)
                elif event != "start_map":
                    raise ValueError(f"{opened} is no object")
                else:
                    for own, own_event, own_value in _keys(events):
                        yield opened, (own, _built(events, own_event, own_value))
            next(events, None)  # raises if anything follows the object
        except (ijson.JSONError, UnicodeDecodeError, ValueError) as error:
            raise damaged(path, "not json, or damaged", error) from error


def _enter(events: Events) -> None:
    event, _ = next(events, ("nothing", None))
    if event != "start_map":
        raise ValueError(f"it is no object but begins with {event}")


def _keys(events: Events) -> Iterator[tuple[str, str, Any]]:
    """Yield the keys of the object that was entered, each with the first event of its value."""
    for event, key in events:
        if event == "end_map":
            return
        yield key, *next(events, ("null", None))


def _built(events: Events, event: str, value: Any, depth: int = 0) -> Any:
    """Return the value that begins with an event."""
    if event in SIMPLE:
        return value
    if depth == MAX_DEPTH:
        raise ValueError(f"values are nested deeper than {MAX_DEPTH} times")
    if event == "start_map":
        return {key: _built(events, first, item, depth + 1) for key, first, item in _keys(events)}
    items = []
    for first, item in events:
        if first == "number":  # nearly all of them
            items.append(item)
        elif first == "end_array":
            break
        else:
            items.append(_built(events, first, item, depth + 1))
    return items
