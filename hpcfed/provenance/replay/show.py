"""A replay as a table, as lines of text, and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcfed.io.atomic import write_whole, writing
from hpcfed.io.figure import literal, rendered
from hpcfed.provenance.replay.replay import Replay, norm_of

if TYPE_CHECKING:
    from rich.table import Table

PANELS = (("loss", "minibatch loss"), ("gradient", "gradient norm"), ("drift", "drift ‖y − w‖"))


def table(replay: Replay) -> Table:
    """Return a terminal table of the replay's steps: samples, loss, gradient norm and drift."""
    from rich import box
    from rich.table import Table

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "samples", "loss", "‖gradient‖", "drift ‖y − w‖"):
        grid.add_column(name, justify="right")
    for step in replay.steps:
        numbers = (f"{value:.6g}" for value in (step.loss, step.gradient, step.drift))
        grid.add_row(str(step.number), str(len(step.y)), *numbers)
    return grid


def lines(replay: Replay) -> list[str]:
    """Return lines on the client's update: its norms and hash, and whether the update is as recorded."""
    vectors = ", ".join(f"‖{name}‖ {norm_of(vector):.6g}" for name, vector in replay.reported.vectors.items())
    scalars = "".join(f", {name} {value:.6g}" for name, value in replay.reported.scalars.items())
    found = [f"reports {vectors}{scalars}; hash {replay.reported.hash:016x}", _verdict(replay)]
    return found if replay.dependence is None else [*found, str(replay.dependence)]


def _verdict(replay: Replay) -> str:
    if replay.parted is not None:
        return f"differs: the state after round {replay.parted} is not the recorded one; 'hpcfed verify' tells more"
    if replay.dropped:
        same = "is" if replay.agrees else "differs: it is not"
        dropped = "this client dropped out before it sent"
        why = "too few clients were left to open the sum" if replay.unopened else dropped
        return f"{why} (secure_aggregation); the round's hash {same} as recorded"
    if replay.skipped:
        left_out = "the run left this client out of the round (on_bad_client: skip)"
        return f"{left_out}: its update is not finite here either" if replay.agrees else f"differs: {left_out}"
    if replay.recorded_hash is None:
        same = "is" if replay.agrees else "differs: it is not"
        return f"no hash of updates was recorded (update_hashes: true); the round's hash {same} as recorded"
    if replay.agrees:
        return "as recorded, bit for bit"
    return f"differs: hash {replay.recorded_hash:016x} was recorded"


def draw(replay: Replay, path: Path) -> None:
    """Draw loss, gradient norm and drift over the steps; write a PNG, PDF or SVG, by the suffix of `path`.

    Raises:
        EnvironmentFailure: the file cannot be written.
    """
    from hpcfed.io.figure_style import LIGHT, Medium, panels

    figure, axes = panels(Medium(8.4, 2.8, 10, legend=False), 1, len(PANELS))
    numbers = [step.number for step in replay.steps]
    for axis, (key, label) in zip(axes.ravel(), PANELS, strict=True):
        values: Sequence[float] = [getattr(step, key) for step in replay.steps]
        axis.plot(numbers, values, color=LIGHT.groups[0])
        axis.set_xlabel("step")
        axis.set_title(label)
    figure.suptitle(f"round {replay.round}, client {replay.client} ({literal(replay.name)})")
    content = rendered(figure, path.suffix[1:])
    with writing(path):
        write_whole(path, content)
