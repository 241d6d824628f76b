"""Untrusted text to plain data: the one reader of YAML and the one reader of JSON, both within bounds.

A recipe, a schedule, a record or a manifest may come from anybody. Results consist of mappings with text keys, lists,
text, numbers, booleans and null alone. The constants below bound their depth, their whole numbers, and for YAML the
size with aliases expanded. Everything else raises `Malformed`.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json
from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    NodeEvent,
)
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode
from ruamel.yaml.parser import Parser

MAX_DEPTH = 64
"""Levels of lists and mappings."""
MOST_NODES = 50_000
"""Values in a YAML text, aliases expanded; a large recipe has some hundred."""
MAX_YAML_LENGTH = 1 << 20
"""Characters of a YAML text, with aliases expanded, too; the largest recipe known has 7,000."""
MAX_JSON_BYTES = 1 << 30
"""Bytes of a JSON file: the schedule of a million clients over a hundred rounds."""
LONGEST_LINE = 1 << 27
"""Bytes of a line; the record's has 7 for each client of a cohort."""
PIECE = 1 << 20
"""Bytes per read."""
INTEGER_RANGE = range(-(1 << 63), 1 << 64)
"""Whole numbers that a word of 64 bits holds."""
UNPRINTABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that no path and no UTF-8 file can hold."""
ESCAPED = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
ZEROS = str.maketrans("123456789", "000000000")


class Malformed(ValueError):
    """Text that is malformed or exceeds the bounds; the message says where."""


def read_text(path: Path, most: int = MAX_JSON_BYTES, *, pipes: bool = False) -> str:
    """Return the text of a file, at most `most` bytes of it; with `pipes`, also of a pipe, such as <(…) in a shell.

    Raises:
        OSError: as the system reports it.
        Malformed: it is a device, too large, or not UTF-8.
    """
    with open_file(path, pipes=pipes) as file:
        content = bytearray()
        if os.fstat(file.fileno()).st_size > most:  # a sparse file may claim any size
            raise Malformed(f"larger than {most:,} bytes")
        while piece := file.read(PIECE):
            content += piece
            if len(content) > most:
                raise Malformed(f"larger than {most:,} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Malformed(f"not UTF-8 text at byte {error.start}") from None


def open_file(path: Path, *, pipes: bool = False) -> BinaryIO:
    """Open a file to read its bytes. In a stranger's folder it may be a device without an end, or a pipe that waits.

    Raises:
        OSError: as the system reports it.
        Malformed: it is a device or, without `pipes`, a pipe.
    """
    refuse_special(path, pipes=pipes)
    return path.open("rb")


def refuse_special(path: Path, *, pipes: bool = False) -> None:
    """Refuse a device and, without `pipes`, a pipe, which a library that opens it would wait for.

    Raises:
        OSError: as the system reports it.
        Malformed: it is one.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (pipes and stat.S_ISFIFO(mode))):
        raise Malformed("neither a file nor a pipe" if pipes else "not a file")


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, which hold no more memory than the longest one may.

    The first one without an end is the last, even if another process is writing the rest of it.

    Raises:
        Malformed: a line is longer than that.
    """
    while line := file.readline(LONGEST_LINE):
        is_whole = line.endswith(b"\n")
        if len(line) == LONGEST_LINE and not is_whole:
            raise Malformed(f"a line of more than {LONGEST_LINE:,} bytes")
        yield line
        if not is_whole:
            return


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        Malformed: it is not JSON, or exceeds the bounds.
    """
    try:
        value = _read_json(text)
    except RecursionError:
        raise Malformed(f"nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise Malformed(str(error)) from None
    suspect = "0" * 20 in text.translate(ZEROS) or ESCAPED.search(text) is not None
    if suspect or text.count("[") + text.count("{") > MAX_DEPTH:
        _check_plain(value, suspect)
    return value


def _read_json(text: str) -> Any:
    """Return the value of a JSON text: by pydantic's reader, which takes a third of the time, or else by Python's.

    What both accept, they read alike; Python's accepts more, and says what is wrong.
    """
    try:
        return from_json(text, cache_strings="keys")
    except ValueError:
        return json.loads(text)


def doubled_key(text: str) -> str | None:
    """Return a key that an object of a JSON text has twice; None if none does. Readers differ in which value they take.

    Raises:
        ValueError: it is not JSON.
    """
    doubled = list[str]()

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            doubled.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return found

    json.loads(text, object_pairs_hook=note)
    return doubled[0] if doubled else None


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML 1.2 text of one document; dates are text, as YAML's core schema has none.

    Tabs at the end of a line are left out: YAML allows them, and the library does not. So are those in literal blocks.

    Raises:
        Malformed: it is not such a text, names a type that is not plain data, or exceeds the bounds.
    """
    with _as_malformed():
        return _yaml().load(_of_bounded_length(TRAILING_TABS.sub("", text)))


def split_list(text: str) -> list[str]:
    """Return the texts of the values of a YAML list without its brackets: ``a, [b, c]`` → ``a`` and ``[b, c]``.

    Raises:
        Malformed: it is not such a list, or exceeds the bounds.
    """
    text = f"[{text}]"
    with _as_malformed():
        values = _yaml().compose(_of_bounded_length(text)).value
    return [text[value.start_mark.index : value.end_mark.index] for value in values]


@contextmanager
def _as_malformed() -> Iterator[None]:
    """Turn the errors of the YAML reader into `Malformed`, and silence its warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Malformed:
        raise
    except RecursionError:
        raise Malformed(f"nested more than {MAX_DEPTH} deep") from None
    except YAMLError as error:
        raise Malformed(_said(error)) from None
    except Exception as error:  # on some malformed texts the YAML reader raises unrelated errors
        raise Malformed(f"not well formed ({type(error).__name__})") from None


def _of_bounded_length(text: str) -> str:
    if len(text) > MAX_YAML_LENGTH:
        raise Malformed(f"longer than {MAX_YAML_LENGTH:,} characters")
    return text


def _check_plain(value: Any, values: bool) -> None:
    """Check the depth, and with `values` every value."""
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        inside = [outer.values() if type(outer) is dict else outer for outer in level]
        if values:
            keys = [outer.keys() for outer in level if type(outer) is dict]
            for entry in chain(*inside, *keys):
                _check_value(entry)
        level = [entry for entries in inside for entry in entries if type(entry) in (dict, list)]
        if not level:
            return
    raise Malformed(f"nested more than {MAX_DEPTH} deep")


def _check_value(value: Any) -> None:
    if type(value) is int and value not in INTEGER_RANGE:
        raise Malformed(f"a whole number beyond 64 bits: {str(value)[:24]}")
    if type(value) is str and UNPRINTABLE.search(value):
        raise Malformed("text with a zero or half a surrogate pair")


class _Bounded(Parser):
    """A parser that checks version, depth and size of what it parses: with aliases, little text stands for much.

    A document is parsed whole before any value of it is built.
    """

    def __init__(self, loader: Any):
        super().__init__(loader)
        self.nodes = self.letters = 0
        self.anchors: dict[str, tuple[int, int, int]] = {}
        """Anchor → number of values, of characters and of levels in its node."""
        self.opened: list[tuple[str | None, int, int, int]] = []
        """For each list or mapping that is open: its anchor, values and characters before it, and its deepest level."""

    def get_event(self) -> Any:
        event = super().get_event()
        if isinstance(event, DocumentStartEvent) and event.version not in (None, (1, 2)):
            raise Malformed("a YAML version other than 1.2")
        if isinstance(event, CollectionEndEvent):
            self._close()
        elif isinstance(event, NodeEvent):
            self._count(event)
        return event

    def _close(self) -> None:
        anchor, before, written, deepest = self.opened.pop()
        if anchor is not None:
            self.anchors[anchor] = self.nodes - before, self.letters - written, deepest - len(self.opened)
        self._note_depth(deepest)

    def _count(self, event: NodeEvent) -> None:
        count, length, levels = 1, len(getattr(event, "value", None) or ""), 0
        line = event.start_mark.line + 1
        if isinstance(event, AliasEvent):
            if event.anchor not in self.anchors:
                raise Malformed(f"line {line}: alias {event.anchor!r} of nothing before it")
            count, length, levels = self.anchors[event.anchor]
        elif isinstance(event, CollectionStartEvent):
            self.opened.append((event.anchor, self.nodes, self.letters, len(self.opened) + 1))
        elif event.anchor is not None:
            self.anchors[event.anchor] = 1, length, 0
        self.nodes, self.letters, depth = self.nodes + count, self.letters + length, len(self.opened) + levels
        self._note_depth(depth)
        if depth > MAX_DEPTH:
            raise Malformed(f"line {line}: nested more than {MAX_DEPTH} deep")
        if self.nodes > MOST_NODES:
            raise Malformed(f"line {line}: more than {MOST_NODES:,} values")
        if self.letters > MAX_YAML_LENGTH:
            raise Malformed(f"line {line}: texts of more than {MAX_YAML_LENGTH:,} characters, aliases expanded")

    def _note_depth(self, depth: int) -> None:
        if self.opened:
            self.opened[-1] = *self.opened[-1][:3], max(self.opened[-1][3], depth)


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Parser, yaml.Constructor = _Bounded, _PlainData
    return yaml


class _PlainData(SafeConstructor):
    """A constructor of plain data alone: the tags of YAML's core schema, and dates as text."""

    yaml_constructors = {}  # noqa: RUF012 (that of SafeConstructor builds sets, dates and bytes)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        if isinstance(node, MappingNode):
            self.flatten_mapping(node)
        for key, _ in getattr(node, "value", ()):
            if not (isinstance(key, ScalarNode) and key.tag in (TEXT, TIME)):
                name = f" ({key.value[:24]})" if isinstance(key, ScalarNode) and key.value else ""
                raise ConstructorError(None, None, f"a key that is not text{name}: quote it", key.start_mark)
        return super().construct_mapping(node, deep)

    def construct_text(self, node: Node) -> str:
        text = self.construct_scalar(node)
        if UNPRINTABLE.search(text):
            raise ConstructorError(None, None, "text with a zero or half a surrogate pair", node.start_mark)
        return text

    def construct_whole(self, node: Node) -> int:
        digits = str(node.value)
        value = self.construct_yaml_int(node) if len(digits) <= 80 else None  # 64 bits and more in base 2
        if value is None or value not in INTEGER_RANGE:
            raise ConstructorError(None, None, f"a whole number beyond 64 bits: {digits[:24]}", node.start_mark)
        return value

    def construct_real(self, node: Node) -> float:
        value = self.construct_yaml_float(node)
        if math.isnan(value):
            raise ConstructorError(None, None, "a number is expected, got not a number (nan)", node.start_mark)
        return value

    def construct_other(self, node: Node) -> Any:
        raise ConstructorError(None, None, f"the type {node.tag!s}, which is not plain data", node.start_mark)


CORE = "tag:yaml.org,2002:"
TEXT, TIME = f"{CORE}str", f"{CORE}timestamp"
for tag, construct in {
    "null": _PlainData.construct_yaml_null,
    "bool": _PlainData.construct_yaml_bool,
    "int": _PlainData.construct_whole,
    "float": _PlainData.construct_real,
    "str": _PlainData.construct_text,
    "timestamp": _PlainData.construct_text,
    "seq": _PlainData.construct_yaml_seq,
    "map": _PlainData.construct_yaml_map,
}.items():
    _PlainData.add_constructor(f"{CORE}{tag}", construct)
_PlainData.add_constructor(None, _PlainData.construct_other)


TRAILING_TABS = re.compile(r"[ \t]*\t[ \t]*$", re.MULTILINE)
PLAINLY = {
    "could not find expected ':'": "found no ':' with a space after it",
    "found character '\\t' that cannot start any token": "found a tab; indent by spaces",
}
"""Words of the YAML reader → words that say what to write."""


def _said(error: YAMLError) -> str:
    """Return the problem and its line, and what the reader was at if that began in a line before."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "not well formed"
    problem = PLAINLY.get(str(problem), str(problem))
    if mark is None:
        return problem
    context, begun = getattr(error, "context", None), getattr(error, "context_mark", None)
    if context and begun is not None and begun.line < mark.line:
        problem = f"{context} from line {begun.line + 1}, {problem}"
    return f"line {mark.line + 1}: {problem}"
