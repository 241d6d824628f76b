"""FLamby's Camelyon16: slides of lymph nodes at two hospitals, from their tiles' features that its scripts extract.

A slide is a bag of tiles, ``NAME.tif.npy`` of shape (tiles, features). As in FLamby's batches, its tiles are put in the
order of one permutation, drawn from seed 42, and cut or padded by zeros to one number.

References: Ogier du Terrail et al., "FLamby", 2022; Litjens et al., "1399 H&E-stained sentinel lymph node sections of
breast cancer patients: the CAMELYON dataset", GigaScience 2018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from data_prep.dataset import Dataset
from data_prep.sources.files import AGAIN, DataSource, Origin, Published, damaged, examine, listed, locate, reading
from data_prep.sources.flamby import URL, table
from data_prep.spool import Spool
from hpcfed.errors import InputError

LABELS, METADATA, INSIDE = "labels.csv", "metadata.csv", "fed_camelyon16"
ORIGIN = Origin(
    "Camelyon16 at two hospitals, as FLamby splits it: 399 slides, 10,000 × 2,048 features each (33 GB), tumour or not",
    URL,
    (Published(LABELS), Published(METADATA)),
    f"{LABELS} and metadata/{METADATA} of FLamby's repository, and a .tif.npy for each slide, by its tiling_slides.py",
)
HOSPITALS = ("RUMC", "UMCU")
LEFT_OUT = ("normal_086.tif.npy", "test_049.tif.npy")
"""Slides that were withdrawn from Camelyon16."""
TILES, SEED = 10_000, 42
"""FLamby's number of tiles, and the seed of its permutations."""


def load(raw: str | Path, *, tiles: int = TILES, incomplete: bool = False) -> Dataset:
    """Return the slides: x (n, tiles, features) float32, y (n, 1) of zeros and ones, by hospital; the challenge's test
    slides are for testing.

    Args:
        raw: folder of the files.
        tiles: rows of a slide.
        incomplete: take the slides that are there, though some of ``labels.csv`` are missing.

    Raises:
        InputError: files are missing, damaged, or of different widths.
    """
    wanted = {LABELS: [LABELS], METADATA: [f"metadata/{METADATA}", METADATA]}
    tables = locate(Path(raw), wanted, inside=INSIDE)
    labels, hospitals = _labels(tables[LABELS]), _hospitals(tables[METADATA])
    folder = tables[LABELS].parent
    names = [name for name in sorted(labels) if name not in LEFT_OUT]
    present = {path.name.lower(): path for path in listed(folder, "*.npy")}
    slides = [name for name in names if name in present]
    if not slides or (len(slides) < len(names) and not incomplete):
        first = next(name for name in names if name not in present)
        got = f"{len(names) - len(slides)} of {len(names)} missing, {first} first"
        raise InputError("slides", where=str(folder), got=got, remedy="add them, or --incomplete")
    if unknown := [name for name in slides if name not in hospitals]:
        raise damaged(tables[METADATA], f"no hospital of {unknown[0]}")
    tests = np.array([name.startswith("test") for name in slides])
    owner = np.array([hospitals[name] for name in slides])
    y = np.array([[labels[name]] for name in slides], np.uint8)
    numbers = np.arange(len(slides))
    paths = [present[name] for name in slides]
    width = _features(paths[0]).shape[1]
    entries, verdict = examine(ORIGIN, tables.values(), title="Camelyon16's labels")
    few = [f"{len(slides)} of {len(names)} slides"] if len(slides) < len(names) else []
    return Dataset(
        name="flamby-camelyon16",
        task="multi-label",
        x=_bags(paths, numbers[~tests], tiles, width),
        y=y[~tests],
        num_classes=1,
        test_x=_bags(paths, numbers[tests], tiles, width),
        test_y=y[tests],
        source={"files": entries, "classes": ["normal", "tumour"], "tiles": tiles, "slides": len(slides)},
        owner=owner[~tests],
        test_owner=owner[tests],
        clients=HOSPITALS,
        rows=numbers[~tests],
        remarks=(verdict, *few),
    )


def _labels(path: Path) -> dict[str, bool]:
    """Return whether a slide has a tumour, by its file's name in small letters."""
    found = {}
    for row in table(path, "filenames", "tumor"):
        if row["tumor"] not in ("True", "False"):
            raise damaged(path, f"{row['filenames'][:40]!r}: tumor {row['tumor'][:20]!r} is neither True nor False")
        found[row["filenames"].lower()] = row["tumor"] == "True"
    return found


def _hospitals(path: Path) -> Mapping[str, int]:
    """Return each slide's hospital, by its file's name in small letters."""
    known = {f"{number}{zero}": number for number in range(len(HOSPITALS)) for zero in ("", ".0")}
    found = {}
    for row in table(path, "slide_name", "hospital_corrected"):
        if row["hospital_corrected"] not in known:
            got = row["hospital_corrected"][:20]
            raise damaged(path, f"{row['slide_name'][:40]!r}: hospital_corrected {got!r} is neither 0 nor 1")
        found[f"{row['slide_name'].lower()}.npy"] = known[row["hospital_corrected"]]
    return found


def _features(path: Path) -> np.ndarray:
    """Return a slide's features, (tiles, features), mapped."""
    with reading(path):
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise damaged(path, "no .npy file of numbers", error) from error
    if found.ndim != 2 or found.dtype.kind != "f" or not found.size:
        expected, got = "numbers (tiles, features)", f"{found.dtype} {found.shape}"
        raise InputError("a slide's features", where=str(path), expected=expected, got=got, remedy=AGAIN)
    return found


def _bags(paths: Sequence[Path], numbers: np.ndarray, tiles: int, width: int) -> np.ndarray:
    """Return some slides, (m, tiles, width) float32, mapped from a temporary file."""
    bags = Spool((tiles, width), np.float32)
    for number in numbers.tolist():
        features = _features(paths[number])
        if features.shape[1] != width:
            where, expected = str(paths[number]), f"{width} features, as {paths[0].name}"
            raise InputError("a slide", where=where, expected=expected, got=str(features.shape[1]))
        chosen = np.random.default_rng(SEED).permutation(len(features))[:tiles]
        bag = np.zeros((tiles, width), np.float32)
        bag[: len(chosen)] = features[chosen]
        if not np.isfinite(bag).all():
            raise damaged(paths[number], "a feature is not finite")
        bags.append(bag[None])
    return bags.finish()


SOURCES = {"flamby-camelyon16": DataSource(load, ORIGIN)}
