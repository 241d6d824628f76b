"""Write tables of six hospitals into a folder ``raw``: the same columns, and an oddity at each."""

from __future__ import annotations

from pathlib import Path

import numpy as np

HEAD = ("age", "sex", "stage", "marker", "outcome")


def write_tables(raw: Path) -> None:
    """Write tables with a mark of Excel's, semicolons and decimal commas, lines of Windows, another order and gaps,
    capitals in the header, and another encoding.
    """
    draw = np.random.default_rng(1)
    raw.mkdir()
    for k, site in enumerate(("Aachen", "Łódź", "St. Mary's", "rural", "north", "süd")):
        marker = draw.normal(size=40 + 10 * k).round(3)
        ages, dead = draw.normal(60 + 3 * k, 10, len(marker)).astype(int), np.where(marker > 0, "dead", "alive")
        rows = [
            (str(ages[i]), "fm"[i % 2], "I" * (1 + i % 3), str(marker[i]), str(dead[i])) for i in range(len(marker))
        ]
        table = [HEAD, *rows]
        if site == "rural":
            gaps = [(*row[:3], row[3] if i % 5 else "NA", row[4]) for i, row in enumerate(rows)]
            table = [(sex, age, marker_, stage, outcome) for age, sex, stage, marker_, outcome in (HEAD, *gaps)]
        if site == "north":
            table[0] = ("Age", "SEX", *HEAD[2:])
        text = "".join(",".join(row) + "\n" for row in table)
        text = {
            "Aachen": "\ufeff" + text,
            "Łódź": text.replace(",", ";").replace(".", ","),
            "St. Mary's": text.replace("\n", "\r\n") + "\r\n\r\n",
        }.get(site, text)
        (raw / f"{site}.csv").write_bytes(text.encode("latin-1" if site == "süd" else "utf-8"))


if __name__ == "__main__":
    write_tables(Path("raw"))
