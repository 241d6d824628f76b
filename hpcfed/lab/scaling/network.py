"""The network assumed by predictions: latency and bandwidth, from the user or measured by `hpcfed doctor`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from hpcfed.errors import InputError
from hpcfed.io.text import parse_json, read_text
from hpcfed.lab.scaling.model import network_of

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
BYTES = {"bit/s": 1 / 8, "B/s": 1.0}
PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
GIVEN = re.compile(
    r"(?P<latency>[\d.eE+-]+) ?(?P<unit>s|ms|us|µs), ?(?P<rate>[\d.eE+-]+) ?(?P<prefix>[kMGT]?)(?P<per>bit/s|B/s)"
)
EXPECTED = "LATENCY,BANDWIDTH such as 20us,10Gbit/s, or a file of hpcfed doctor --json on two ranks or more"


@dataclass(frozen=True)
class Network:
    """The network between ranks, as the cost model sees it.

    Attributes:
        latency: seconds of a message from one rank to another, whatever its size.
        byte: further seconds for each byte of a message; the inverse of the bandwidth.
        source: in words, where the two numbers come from.
    """

    latency: float
    byte: float
    source: str


def parse_network(text: str) -> Network:
    """Return the network that `text` names: ``20us,10Gbit/s``, or the path of a report by ``hpcfed doctor --json``.

    Raises:
        InputError: the text is neither, or the report has no Allreduce on two ranks or more.
    """
    found = GIVEN.fullmatch(text.strip())
    if found is None:
        return _measured(Path(text))
    try:
        latency = float(found["latency"]) * SECONDS[found["unit"]]
        rate = float(found["rate"]) * PREFIXES[found["prefix"]] * BYTES[found["per"]]
    except ValueError:
        raise InputError("--network", expected=EXPECTED, got=text) from None
    if not (0 <= latency < math.inf and 0 < rate < math.inf):
        raise InputError("--network", expected="a latency of at least 0 and a positive bandwidth", got=text)
    return Network(latency, 1 / rate, f"given as {text.strip()}")


def _measured(path: Path) -> Network:
    try:
        if not path.is_file():
            raise FileNotFoundError
    except OSError:  # also of a text that is too long for a path
        raise InputError("--network", expected=EXPECTED, got=str(path)) from None
    try:
        report = parse_json(read_text(path))
        ranks, probed = len(report["ranks"]), report["measured"]["allreduce"]
        latency, byte = network_of([(ranks, int(size), float(seconds)) for size, seconds in probed])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise InputError("--network", where=str(path), expected="a report of hpcfed doctor --json", got=got) from None
    if ranks < 2:
        raise InputError("--network", where=str(path), expected="a report on two ranks or more", got="one rank")
    hosts = len({rank["host"] for rank in report["ranks"]})
    return Network(
        latency, byte, f"measured by hpcfed doctor on {ranks} ranks of {hosts} host{'s' * (hosts > 1)}, {path}"
    )
