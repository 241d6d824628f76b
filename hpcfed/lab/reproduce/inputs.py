"""The inputs of an experiment's runs: federation files, and the initial parameters of its linear models."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from data_prep.catalogue import SOURCES
from data_prep.dataset import Dataset
from data_prep.dealt import with_noise
from data_prep.sources.files import digests, reading
from data_prep.split import Split, split
from data_prep.write import write
from hpcfed.data.federation import Federation
from hpcfed.errors import EnvironmentFailure, InputError
from hpcfed.io.atomic import write_whole
from hpcfed.lab.reproduce.experiment import Data, Experiment


@dataclass(frozen=True)
class Places:
    """Two folders: `output` of all experiments' prepared data and runs, and `raw` of raw data, None if there are none.

    `raw` has a subfolder for each data set's files.
    """

    output: Path
    raw: Path | None = None

    def federation(self, data: Data, seed: int) -> Path:
        """Return the path of a case's federation file, the same for each run's `seed` unless ``data.seed`` is ``run``.

        The file's name has a digest of all settings that determine its content; ``data.raw`` is one of them if it names
        a file, but not if it names a folder. If ``data.file`` is set, it is the path.
        """
        if data.file:
            return Path(data.file)
        left_out = {"start", "file"} if "/" in data.raw else {"start", "file", "raw"}  # raw: a file, or a folder
        left_out |= set() if data.noise else {"noise"}
        wanted = data.model_dump(exclude=left_out) | {"seed": seed if data.seed == "run" else data.seed}
        words = [data.source, data.partition, *(str(value) for value in data.options.values())]
        words += [
            f"noise-{data.noise:g}" if data.noise else "",
            str(data.clients or ""),
            str(seed) if data.seed == "run" else "",
        ]
        digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:8]
        readable = re.sub(r"[^\w.]+", "-", "-".join(word for word in words if word))
        return self.output / "data" / f"{readable}-{digest}.h5"

    def start(self, data: Data, seed: int) -> Path | None:
        """Return the path of the file with a case's initial parameters; None if they are random."""
        return None if data.start is None else self.federation(data, seed).with_suffix(".safetensors")

    def raw_of(self, data: Data) -> Path | None:
        """Return the subfolder of `raw` that ``data.raw`` names, or the file in it; None if it does not exist."""
        name, _, file = data.raw.partition("/")
        found = self._folder(name)
        if found is None or not file:
            return found
        return found / file if (found / file).is_file() else None

    def _folder(self, name: str) -> Path | None:
        """Return the subfolder of `raw` whose name is `name`, ignoring case and punctuation; None if there is none."""
        if self.raw is None or not self.raw.is_dir():
            return None
        named = (child for child in sorted(self.raw.iterdir()) if child.is_dir() and _plain(child.name) == name)
        return next(named, None)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def missing(data: Data, places: Places) -> str:
    """Return as text the missing files of a case's data; "" if none is missing.

    Nothing is missing if the federation exists, if the raw files exist, or if the source needs no files.
    """
    if data.file:
        return "" if Path(data.file).exists() else f"{data.file} (no such file)"
    if not data.raw or places.raw_of(data) is not None or places.federation(data, 0).exists():
        return ""
    where = f"{places.raw or 'RAW'}/{data.raw}"
    return f"{data.source} ({f'as {where}' if '/' in data.raw else f'put its files into {where}'})"


def lacking(experiment: Experiment, places: Places) -> dict[str, str]:
    """Return case name → missing files as text, for the cases that cannot run."""
    found = {name: missing(case.data, places) for name, case in experiment.cases.items()}
    return {name: words for name, words in found.items() if words}


def is_prepared(experiment: Experiment, case: str, places: Places) -> bool:
    """Return whether a case's federation files exist for all seeds."""
    data = experiment.cases[case].data
    return all(places.federation(data, seed).exists() for seed in experiment.seed_numbers)


def prepare(data: Data, seed: int, places: Places) -> Iterator[str]:
    """Write the missing files of a case's data, federation and initial parameters; yield a line to print for each.

    Jobs that do so at once make equal files. One that is there stays, since another job may be reading it; where both
    write at the same moment, the last one's stays.

    Raises:
        InputError: the raw files are missing or malformed, or differ from those of the existing federation.
        EnvironmentFailure: the disk refuses.
    """
    if data.file:
        return
    path, start = places.federation(data, seed), places.start(data, seed)
    if path.exists():
        _check_raw(path, places.raw_of(data))
    made = [file for file in (path, start) if file is not None and not file.exists()]
    if not made:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        dataset = _with_test(_load(data, seed, places), data)
        if path in made:
            source, asked = SOURCES[data.source], _seed(data, seed)
            clients = None if source.takes("clients") else data.clients  # None where the source makes the clients
            options = {key: value for key, value in data.options.items() if not source.takes(key)}
            dealt = split(dataset, data.partition, clients, asked, options)
            if not path.exists():
                write(path, _with_noise(dataset, data.noise, dealt, asked), **vars(dealt), overwrite=True)
        if start is not None and start in made and not start.exists():
            write_whole(start, _start(dataset, data))
    except (NotADirectoryError, FileExistsError):
        raise InputError(
            "a file is where the folder must be", where=str(path.parent), remedy="choose --output"
        ) from None
    except OSError as error:
        raise EnvironmentFailure("cannot be written", where=str(path.parent), got=error.strerror or "") from None
    yield from (f"prepared {file}" for file in made)


def _check_raw(federation: Path, raw: Path | None) -> None:
    """Check raw files, by name, against the SHA-256 of the files that the federation was made from.

    Raises:
        InputError: a file's content differs.
    """
    if raw is None:
        return
    with Federation.open(federation) as opened:
        files = opened.source.get("files")
    recorded = {(one["name"], one["sha256"]) for one in files} if isinstance(files, list) else set()
    there = [raw] if raw.is_file() else sorted(path for path in raw.rglob("*") if path.is_file())
    for name in sorted({name for name, _ in recorded}):
        named = [path for path in there if path.name == name]
        if named and not any((name, _sha256(path, path.stat().st_mtime_ns)) in recorded for path in named):
            raise InputError(
                f"another {name} than that of the prepared file",
                where=str(named[0]),
                expected=f"the one that {federation} was made from",
                remedy="choose another --output, or the --raw of before",
            )


@cache
def _sha256(path: Path, changed: int) -> str:
    """Return a file's SHA-256, cached by path and modification time `changed`, in ns."""
    with reading(path):
        return digests(path)[1]


def _seed(data: Data, run: int) -> int:
    """Return the seed that a case's data is made with, for runs of seed `run`."""
    return SOURCES[data.source].seed if data.seed is None else run if data.seed == "run" else data.seed


def _load(data: Data, seed: int, places: Places) -> Dataset:
    raw = places.raw_of(data)
    if data.raw and raw is None:
        raise InputError("no raw data", expected=missing(data, places), remedy="name the folder above it by --raw")
    arguments = {"raw": raw, "seed": _seed(data, seed), "clients": data.clients, **data.options}
    source = SOURCES[data.source]
    return source.load(**{key: value for key, value in arguments.items() if source.takes(key) and value is not None})


def _with_noise(dataset: Dataset, noise: float, dealt: Split, seed: int) -> Dataset:
    if not noise:
        return dataset
    x = np.empty(dataset.x.shape, np.float32)
    for client in range(dealt.num_clients):
        rows = np.flatnonzero(dealt.owner == client)
        x[rows] = with_noise(dataset.x[rows], noise, client, dealt.num_clients, seed)
    if (test_x := dataset.test_x) is not None:
        test_x = test_x.astype(np.float32) / np.float32(255 if test_x.dtype == np.uint8 else 1)
    return replace(dataset, x=x, test_x=test_x)


def _with_test(dataset: Dataset, data: Data) -> Dataset:
    """Return the data set with the case's test set (`Data.test`)."""
    if data.test == "own":
        return dataset
    if data.test == "training":
        return replace(dataset, test_x=dataset.x, test_y=dataset.y, test_owner=None)
    if data.test == "solution":
        pooled = dataset.x.reshape(len(dataset.x), -1)
        optimum = np.linalg.lstsq(pooled, dataset.y.reshape(len(pooled), 1), rcond=None)[0]
    else:
        optimum = np.asarray(data.test, dtype=dataset.x.dtype)[:, None]
    return replace(dataset, test_x=np.eye(len(optimum), dtype=dataset.x.dtype), test_y=optimum)


def _start(dataset: Dataset, data: Data) -> bytes:
    """Return a linear model's initial parameters as bytes of a safetensors file; classifiers also have a bias."""
    features = int(np.prod(dataset.x.shape[1:]))
    if dataset.num_classes is not None:
        shape, kind = (dataset.num_classes, features), np.dtype(np.float32)
        return save({"weight": np.zeros(shape, kind), "bias": np.zeros(shape[0], kind)})
    values = np.zeros(features) if data.start == 0 else np.asarray(data.start, np.float64)
    return save({"weight": values.reshape(1, features).astype(dataset.x.dtype)})
