"""The data of ``hpcfed.run(data=…)``: samples that a notebook holds, written beside the run by `write_federation`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from data_prep.frames import holds_frames
from data_prep.own import write_federation
from data_prep.progress import shown
from data_prep.write import of_content
from hpcfed.errors import InputError, nearest, placed

FILE = "data.h5"
"""Name of the file, but for the digits of its content."""
EXAMPLES = {"frame": "{'clients': frame, 'client': 'hospital', 'target': 'ill'}", "pairs": "{'north': (x, y), …}"}
ELSEWHERE = dict.fromkeys(("data", "dataset", "df", "frame", "samples", "table", "train"), "clients") | dict.fromkeys(
    ("label", "labels", "outcome", "y"), "target"
)
"""Other words for the arguments of `write_federation`."""


@dataclass(frozen=True)
class GivenData:
    """Arguments of `write_federation`."""

    clients: Any
    options: Mapping[str, Any]

    def write(self, folder: Path, name: str, say: Callable[[str], None]) -> Path:
        """Write the federation file into a folder, showing progress, and return its path, which its content decides.

        Raises:
            InputError, EnvironmentFailure: as `write_federation`.
        """
        with placed("data"), shown(lambda line: say(f"{name}: {line}")):
            content = write_federation(
                folder / FILE, self.clients, **{"name": name, **self.options}, overwrite=True, by_content=True
            )
        return of_content(folder / FILE, content)


def given_data(data: Any) -> GivenData:
    """Return samples of clients, or a mapping of `write_federation`'s arguments, as such arguments.

    Raises:
        InputError: an unknown argument, or samples without their clients.
    """
    if isinstance(data, Mapping) and _has_arguments(data):
        known = ("clients", *_options())
        for key in data:
            if key not in known:
                meant = ELSEWHERE.get(str(key))
                remedy = f"did you mean {meant!r}?" if meant else nearest(str(key), known)
                raise InputError(f"data: unknown key {key!r}", remedy=remedy)
        if "clients" not in data:
            raise InputError("data: no samples", remedy=f"data={EXAMPLES['frame']}, or data={EXAMPLES['pairs']}")
        return _checked(data["clients"], {key: value for key, value in data.items() if key != "clients"})
    if holds_frames(data) and type(data).__name__ != "DatasetDict":
        raise InputError("data: a data frame without its column of y", remedy=f"data={EXAMPLES['frame']}")
    if _lacks_clients(data):
        remedy = f"data={EXAMPLES['pairs']}; hpcfed.partition(y, 'iid').clients(x, y), or .clients(dataset), deals them"
        raise InputError("data: samples without their clients", got=type(data).__name__, remedy=remedy)
    return _checked(data, {})


def _checked(clients: Any, options: Mapping[str, Any]) -> GivenData:
    if type(clients).__name__ == "DatasetDict":  # of Hugging Face, whose names are those of splits
        remedy = "data={'clients': splits['train'], 'test': splits['test'], 'client': 'hospital', 'target': 'ill'}"
        raise InputError("data: a DatasetDict", expected="clients", got=", ".join(clients), remedy=remedy)
    return GivenData(clients, options)


def _options() -> list[str]:
    names = [one.name for one in signature(write_federation).parameters.values() if one.kind is Parameter.KEYWORD_ONLY]
    return [name for name in names if name not in ("overwrite", "by_content")]


def _has_arguments(data: Mapping[str, Any]) -> bool:
    """Whether a mapping has arguments, ``clients`` or words among them, and not a client's samples at each key."""
    named = "clients" in data or any(isinstance(value, str) for value in data.values())
    return named and not data.keys().isdisjoint(("clients", *_options(), *ELSEWHERE))


def _lacks_clients(data: Any) -> bool:
    """Whether these are an array, a dataset, a loader, or x and y, and no pairs of a name and samples."""
    if isinstance(data, Mapping):
        return data.keys() == {"x", "y"}
    if isinstance(data, tuple | list):
        return any(hasattr(one, "shape") for one in data)
    return hasattr(data, "__getitem__") or hasattr(data, "dataset")
