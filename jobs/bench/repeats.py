"""How many rounds were run twice, since the units of their sums did not suit the updates (column ``attempts``).

    python jobs/bench/repeats.py FOLDER...

Every run below the folders counts, grouped by the folder that holds its experiment; the worst run is named.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcfed.run_folder.rounds import RECORD, read_rounds


def repeats(folders: Sequence[Path]) -> Iterator[tuple[str, str, int, int]]:
    """Yield experiment, run, rounds run twice and rounds of each record; the experiment of a sweep is its folder."""
    for folder in folders:
        for record in sorted(folder.rglob(RECORD)):
            attempts = [row.get("attempts") or 1 for row in read_rounds(record)]
            sweep = next((parent for parent in record.parents if parent.name == "sweep"), record.parent)
            yield sweep.parent.name, record.parent.name, sum(number > 1 for number in attempts), len(attempts)


def main(folders: Sequence[Path]) -> None:
    """Print a line for each experiment, and the sum of all."""
    groups: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for experiment, run, twice, rounds in repeats(folders):
        groups[experiment].append((run, twice, rounds))
    print("| experiment | runs | rounds | run twice | worst run |\n|---|---|---|---|---|")
    for experiment, runs in sorted(groups.items()):
        twice, rounds = (sum(one[place] for one in runs) for place in (1, 2))
        run, most, of = max(runs, key=lambda one: one[1] / max(one[2], 1))
        worst = f"{run}: {most} of {of}" if most else "–"
        print(f"| {experiment} | {len(runs)} | {rounds} | {twice} ({twice / max(rounds, 1):.2%}) | {worst} |")
    everything = [one for runs in groups.values() for one in runs]
    twice, rounds = (sum(one[place] for one in everything) for place in (1, 2))
    print(f"| all | {len(everything)} | {rounds} | {twice} ({twice / max(rounds, 1):.2%}) | |")


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
