"""Output that cannot be written: a run goes on, a query fails; control characters are escaped; files are whole."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import h5py
import pytest
from click.shell_completion import ShellComplete
from ruamel.yaml import YAML

from hpcfed.cli.main import cli, main
from hpcfed.io.atomic import write_whole
from hpcfed.io.console import Console
from hpcfed.io.output import Output
from tests.launch import ROOT


def full() -> TextIO:
    return Path("/dev/full").open("w", encoding="utf-8")


def unread() -> TextIO:
    """A pipe whose reader has left."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w", encoding="utf-8")


def closed() -> TextIO:
    stream = full()
    stream.close()
    return stream


def in_ascii() -> TextIO:
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii")


def called(arguments: list[str], stream: TextIO | None, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return left.value.code


@pytest.mark.parametrize("stream", [full, unread, closed, in_ascii, lambda: None])
def test_a_run_goes_on_where_its_progress_cannot_be_printed(stream, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert called(["run", "recipe.yaml"], stream(), monkeypatch) == 0
    assert json.loads((folder / "run" / "result.json").read_text())["rounds"] == 3


@pytest.mark.parametrize("command", [["inspect", "small.h5"], ["reproduce", "--list"]], ids=" ".join)
@pytest.mark.parametrize(("stream", "code"), [(full, 4), (unread, 0), (in_ascii, 0)])
def test_a_result_that_cannot_be_printed_is_missed_unless_its_reader_has_left(
    stream: Callable[[], TextIO], code, command, folder, monkeypatch, capsys
):
    monkeypatch.chdir(folder)
    assert called(command, stream(), monkeypatch) == code
    said = "hpcfed: standard output: cannot be written: got No space left on device\n"
    assert capsys.readouterr().err == (said if code else "")


def test_no_file_takes_the_place_of_a_closed_standard_output(tmp_path):
    """Its number would go to the next file that is opened, and what libraries print into that file."""
    opens = "with streams(matters=True), open('file', 'w') as file: print('x'); file.write(str(file.fileno()))"
    command = [sys.executable, "-c", f"from hpcfed.io.output import streams\n{opens}"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], cwd=tmp_path, env=env, check=True)
    assert int((tmp_path / "file").read_text()) > 2


def test_names_steer_no_terminal(folder, command):
    title = "\x1b]0;mine\x07\x1b[2Jgone\u202e"
    with h5py.File(folder / "small.h5", "r+") as file:
        file.attrs["name"] = title
        file.attrs["source"] = json.dumps({"files": title})
    done = command(["inspect", "small.h5"], folder)
    assert done.returncode == 0
    assert r"\x1b]0;mine\x07\x1b[2Jgone\u202e" in done.stdout
    refused = command(["run", f"{title}.yaml"], folder)
    shown = io.StringIO()
    print(title, file=Output(shown))
    Console(file=shown, force_terminal=True, highlight=False, markup=False).print(title, style="bold")
    for text in (done.stdout + refused.stderr, shown.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")):
        assert r"\x1b[2Jgone" in text
        assert not set("\x1b\x07\u202e") & set(text)


def test_the_shell_completes_commands(folder, command, monkeypatch):
    for name, value in (("_HPCFED_COMPLETE", "bash_complete"), ("COMP_WORDS", "hpcfed ver"), ("COMP_CWORD", "1")):
        monkeypatch.setenv(name, value)
    done = command([], folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "plain,verify\n", "")


@pytest.mark.parametrize(
    ("words", "some", "none"),
    [
        (["loc"], {"local."}, {"rounds="}),
        (["local."], {"local.lr=", "local.steps="}, {"local.server_lr="}),
        (["algorithm."], {"algorithm.eps=", "algorithm.name="}, {"algorithm.alpha="}),
        (["algorithm.name=feddyn", "algorithm.al"], {"algorithm.alpha="}, set()),
        (["algorithm.name=fedex"], {"algorithm.name=fedexp", "algorithm.name=fedexp-m"}, {"algorithm.name=fedavg"}),
        (["algorithm.name", "=", "fedex"], {"fedexp", "fedexp-m"}, {"fedavg"}),  # as bash splits it
        (["algorithm.name", "=", ""], {"fedexp", "fedavg"}, {"local."}),
        (["reduction", "=", "fast", "dev"], {"device="}, {"reduction="}),
        (["local.lr=0.1", "evaluate.model=l"], {"evaluate.model=last", "evaluate.model=last-two"}, set()),
        (["updates.0.quanti"], {"updates.0.quantize."}, set()),
        (["updates.0.quantize.b"], {"updates.0.quantize.bits="}, set()),
        (["gone.x=1", "gone.y="], set(), {"fast"}),
    ],
    ids=" ".join,
)
def test_the_shell_completes_keys_and_values_of_a_recipe(words, some, none, tmp_path, monkeypatch):
    (tmp_path / "r.yaml").write_text("data: d.h5\nalgorithm: {name: fedexp}\n")
    monkeypatch.chdir(tmp_path)
    *typed, last = words
    for command in ("run", "sweep") if last == "loc" else ("run",):
        found = ShellComplete(cli, {}, "hpcfed", "_HPCFED_COMPLETE").get_completions([command, "r.yaml", *typed], last)
        values = {item.value for item in found}
        assert some <= values
        assert not none & values
        assert all(value.startswith(last) for value in values)


def test_bash_completes_without_a_space_behind_a_section(command, tmp_path, monkeypatch):
    monkeypatch.setenv("_HPCFED_COMPLETE", "bash_source")
    done = command([], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "compopt -o nospace" in done.stdout
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)


FAILS = """
from hpcfed import UpdatePart
from hpcfed.updates import Sent


class Fails(UpdatePart):
    how: str

    def send(self, vectors, state, shared, context):
        if context.client.client == 0 and self.how == "raises":
            raise ValueError("no link")
        return Sent({name: vector * float("nan") for name, vector in vectors.items()} if self.how == "all" else vectors)
"""
COMMANDS = """
import sys
from hpcfed.cli.main import main

for arguments in map(str.split, sys.argv[1:]):
    try:
        main(arguments)
    except SystemExit as left:
        print("exit code", left.code, flush=True)
"""


def test_what_a_run_logs_of_its_rounds_is_not_printed_where_they_are_computed_again(folder):
    """Neither is a log named where there is none."""
    (folder / "fails.py").write_text(FAILS)
    recipe = YAML(typ="safe").load(folder / "recipe.yaml")
    for how in ("raises", "all"):
        changes = {"updates": [{"factory": "fails:Fails", "args": {"how": how}}], "on_bad_client": "skip"}
        (folder / f"{how}.yaml").write_text(json.dumps({**recipe, **changes, "name": how, "output": how}))
    again = [
        "verify raises --all",
        "replay raises --round 1 --client 1",
        "compare raises raises",
        "estimate raises.yaml",
    ]
    ends = ["replay raises --round 1 --client 0", "estimate all.yaml"]
    script = [sys.executable, "-c", COMMANDS, "run raises.yaml", *again, *ends]
    done = subprocess.run(script, cwd=folder, capture_output=True, text=True, encoding="utf-8")
    assert [line for line in done.stdout.splitlines() if line.startswith("exit")] == ["exit code 0"] * 5 + [
        "exit code 2"
    ] * 2
    of_replay, of_estimate = done.stderr.splitlines()
    assert of_replay.startswith("hpcfed: round 1, client 0 ")
    assert of_replay.endswith("in send: ValueError: no link; correct it there")
    assert of_estimate.startswith("hpcfed: the recipe diverges at once: got round 1: training failed for every client")
    assert "logs/" not in of_estimate
    assert "ValueError: no link" in (folder / "raises" / "logs" / "rank-0.log").read_text()


def test_two_writers_of_a_file_do_not_meet(tmp_path):
    """As processes of two containers with one number, which shared a temporary file; a link there led elsewhere."""
    file, victim = tmp_path / "table.md", tmp_path / "victim"
    file.with_name(f".table.md.{os.getpid()}.tmp").symlink_to(victim)

    def pieces():
        yield b"first, "
        write_whole(file, "second")
        assert file.read_text() == "second"
        yield b"whole"

    write_whole(file, pieces())
    assert (file.read_text(), victim.exists()) == ("first, whole", False)
    assert sorted(entry.suffix for entry in tmp_path.iterdir()) == [".md", ".tmp"]  # the link
