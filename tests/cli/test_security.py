"""Each promise of SECURITY.md has its test: here, or where the list says."""

from __future__ import annotations

import ast
import csv
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import pytest

import hpcfed
from hpcfed.config.load import dump_yaml, load_recipe
from hpcfed.errors import InputError
from hpcfed.io.text import MAX_DEPTH, Malformed, parse_json, parse_yaml
from hpcfed.lab.cite import bibtex
from hpcfed.provenance.code_of_rounds import Permission
from hpcfed.provenance.verify.verify import Verification, verify
from hpcfed.ranks.world import World
from tests.launch import ROOT
from tests.mpi.recipes import small, write_recipe, write_small

pytestmark = pytest.mark.one_mpi

PROMISES = {
    "opens no network service": "tests/cli/test_security.py::test_no_module_listens",
    "Nor does a file beside a recipe that is named like a library": (
        "tests/cli/test_named_code.py::test_a_file_named_like_a_library_does_not_run_in_its_place"
    ),
    "the import path stays as it is": (
        "tests/cli/test_named_code.py::test_code_of_a_recipe_finds_its_neighbours_as_late_as_it_asks_for_them"
    ),
    "named like a module of Python's": (
        "tests/cli/test_named_code.py::test_a_file_named_like_a_module_is_never_chosen_in_silence"
    ),
    "tags that build objects": "tests/cli/test_security.py::test_text_is_plain_data_within_bounds",
    "never pickle": "tests/cli/test_security.py::test_no_module_unpickles_but_the_reader_of_cifar",
    "pickled CIFAR batches": "tests/data/test_cifar.py::test_pickles_of_others",
    "sizes that a file claims": (
        "tests/cli/test_wrong_inputs.py::test_a_file_of_any_claimed_size_is_refused_before_it_is_read"
    ),
    "Wrong input ends in one line": "tests/cli/test_wrong_inputs.py::test_wrong_input_exits_2_with_one_line",
    "checkpoint never becomes another model": (
        "tests/mpi/test_resume.py::test_a_damaged_checkpoint_is_reported_and_the_one_before_used"
    ),
    "Nothing is written outside the output folder": (
        "tests/cli/test_security.py::test_nothing_is_written_outside_the_output_folder"
    ),
    "files that do not belong to a run is refused": (
        "tests/cli/test_wrong_inputs.py::test_wrong_input_exits_2_with_one_line"
    ),
    "would pass through a link": (
        "tests/cli/test_forged.py::test_nothing_is_written_through_a_link_in_a_strangers_folder"
    ),
    "opens no file that is a link": "tests/cli/test_forged.py::test_a_signed_folder_is_as_it_was_signed",
    "that only a certificate names": "tests/cli/test_forged.py::test_a_certificate_names_no_other_file",
    "writes nothing there": "tests/cli/test_forged.py::test_a_killed_verify_leaves_nothing",
    "`make fuzz` tests each of these readers": (
        "tests/fuzz/test_fuzz.py::test_inputs_that_nobody_meant_are_read_or_refused_in_one_line"
    ),
    "says\n  the names and the places": "tests/cli/test_named_code.py::test_code_of_a_recipe_is_reported",
    "never import code from it": "tests/cli/test_security.py::test_reports_and_citations_import_no_code",
    "then it warns": "tests/cli/test_named_code.py::test_code_of_a_recipe_is_reported",
    "is the recorded one": "tests/mpi/test_verify.py::test_code_and_data_that_have_moved_are_named",
    "only with `--run-code`": "tests/cli/test_forged.py::test_recorded_code_runs_after_a_question_alone",
    "in the run's folder, only": "tests/cli/test_security.py::test_code_in_a_strangers_folder_does_not_run_unasked",
    "are expanded": "tests/cli/test_security.py::test_variables_in_paths_are_expanded",
    "are written as the federation or the raw data have": (
        "tests/cli/test_security.py::test_names_in_tables_are_written_as_they_are"
    ),
    "can write other checkpoints with correct checksums": (
        "tests/cli/test_tampered.py::test_no_tampering_passes_for_what_the_recipe_gives"
    ),
    "A signature does": "tests/cli/test_forged.py::test_a_signed_folder_is_as_it_was_signed",
}
"""Words of the page, each in one line or two, and the test of what they promise."""


def test_each_promise_has_a_test():
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for words, test in PROMISES.items():
        assert " ".join(words.split()) in " ".join(page.split()), words
        path, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), test


LISTEN = {"listen", "urlopen", "urlretrieve", "create_server"}
UNSAFE = re.compile("torch.*load|allow_pickle")
UNPICKLE = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal"}


@pytest.fixture(scope="module")
def sources() -> dict[Path, tuple[str, list[ast.AST]]]:
    """Every module that names one of these, with its text and syntax: the others need not be parsed."""
    paths = sorted([*(ROOT / "hpcfed").rglob("*.py"), *(ROOT / "data_prep").rglob("*.py")])
    words = re.compile("|".join([*LISTEN, *UNPICKLE, UNSAFE.pattern]))
    texts = {path: text for path in paths if words.search(text := path.read_text(encoding="utf-8"))}
    return {path: (text, [*ast.walk(ast.parse(text))]) for path, text in texts.items()}


def test_no_module_listens(sources):
    for path, (_, nodes) in sources.items():
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        assert not {node.func.attr for node in calls if isinstance(node.func, ast.Attribute)} & LISTEN, path


def test_no_module_unpickles_but_the_reader_of_cifar(sources):
    for path, (text, nodes) in sources.items():
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        if imported & UNPICKLE:
            assert path.parent.name == "sources" or "Unpickler" in text, path
        calls = [ast.unparse(node) for node in nodes if isinstance(node, ast.Call)] if UNSAFE.search(text) else []
        assert not [call for call in calls if call.startswith("torch.load(") or "allow_pickle=True" in call], path


def test_text_is_plain_data_within_bounds():
    for text in ("!!python/object/apply:os.system [ls]", "!!set {a}", "? [a]\n: b", "a: 18446744073709551616"):
        with pytest.raises(Malformed):
            parse_yaml(text)
    deep = "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2)
    for parse in (parse_json, parse_yaml):
        with pytest.raises(Malformed):
            parse(deep)
    aliases = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for before, name in pairwise("abcdefg"):
        aliases += f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    with pytest.raises(Malformed):
        parse_yaml(aliases)


def test_nothing_is_written_outside_the_output_folder(tmp_path, command):
    write_small(tmp_path)
    write_recipe(tmp_path, evaluate={"clients": {"every": 1}}, update_hashes=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*")}
    assert command(["run", "recipe.yaml", "output=theirs/run", "-q"], tmp_path).returncode == 0
    assert command(["verify", "theirs/run", "--all"], tmp_path).returncode == 0
    shutil.rmtree(tmp_path / "theirs")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*")} == before


CODE = "open({ran!r}, 'w').write('yes')\nfrom torch import nn\n\ndef net():\n    return nn.Linear(12, 4)\n"


def test_reports_and_citations_import_no_code(tmp_path, command):
    write_small(tmp_path)
    (tmp_path / "of_a_stranger.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    recipe = small(tmp_path / "run", data=str(tmp_path / "small.h5"), python_path=[str(tmp_path)])
    run = hpcfed.run(recipe | {"model": {"factory": "of_a_stranger:net"}}, quiet=True).folder
    (tmp_path / "ran").unlink()
    sys.modules.pop("of_a_stranger")
    assert command(["report", run, "--page-only"], tmp_path).returncode == 0
    assert command(["watch", run, "--once"], tmp_path).returncode == 0
    assert command(["cite", run], tmp_path).returncode == 0
    assert "mcmahan" in bibtex(run).lower()
    assert hpcfed.load(run).status == "finished"
    assert not (tmp_path / "ran").exists()


def test_code_in_a_strangers_folder_does_not_run_unasked(tmp_path, command):
    """Not even where their recipe names the folder of the run itself, with the recorded code in it."""
    write_small(tmp_path)
    (tmp_path / "of_a_stranger.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    recipe = small(tmp_path / "run", data=str(tmp_path / "small.h5"), python_path=[str(tmp_path)])
    run = hpcfed.run(recipe | {"model": {"factory": "of_a_stranger:net"}}, quiet=True).folder
    (tmp_path / "of_a_stranger.py").rename(run / "of_a_stranger.py")
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace(f"python_path:\n- {tmp_path}\n", f"python_path:\n- {run}\n"))
    assert (run / "recipe.yaml").read_text() != text
    (run / "certificate.json").unlink()
    (tmp_path / "ran").unlink()
    sys.modules.pop("of_a_stranger")
    for words in (["verify", run, "--all"], ["replay", run, "--round", 1, "--client", 0]):
        done = command(words, tmp_path)
        assert (done.returncode, (tmp_path / "ran").exists()) == (2, False), done.stdout
        assert "--run-code" in done.stderr
    assert command(["verify", run, "--all", "--run-code"], tmp_path).returncode == 0
    assert (tmp_path / "ran").exists()


def of_observer(recipe: dict[str, Any], run: Path) -> None:
    recipe |= {"python_path": [str(run)], "observers": [{"factory": "of_a_stranger:net"}]}


def of_run_folder(recipe: dict[str, Any], run: Path) -> None:
    recipe |= {"python_path": [str(run)], "model": {"factory": "of_a_stranger:net"}}


def of_folder_above(recipe: dict[str, Any], run: Path) -> None:
    recipe |= {"python_path": [str(run.parent)], "model": {"factory": "run.of_a_stranger:net"}}


def of_python(recipe: dict[str, Any], run: Path) -> None:
    recipe["model"] = {"factory": "subprocess:Popen", "args": {"args": ["touch", str(run.parent / "ran")]}}


UNRECORDED = {
    of_observer: (0, "the round's hash is as recorded"),
    of_run_folder: (2, "code.json does not have of_a_stranger:net"),
    of_folder_above: (2, "code.json does not have run.of_a_stranger:net"),
    of_python: (2, "calls subprocess:Popen, which is installed here; read its arguments; allow it with --run-code"),
}


@pytest.mark.parametrize("changed", UNRECORDED)
def test_code_that_no_record_has_does_not_run(changed, tmp_path):
    """Of a stranger's recipe: an observer, a module in the run's folder, and a program started by Python's own."""
    write_small(tmp_path)
    run = hpcfed.run(small(tmp_path / "run", data=str(tmp_path / "small.h5")), quiet=True).folder
    (run / "of_a_stranger.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    recipe = parse_yaml((run / "recipe.yaml").read_text())
    changed(recipe, run)
    (run / "recipe.yaml").write_text(dump_yaml(recipe))
    (run / "certificate.json").unlink()
    code, words = UNRECORDED[changed]
    said: list[str] = []
    for call in (
        lambda: verify(Verification(run, None, 0, permission=Permission(option="--run-code")), World(), said.append),
        lambda: hpcfed.replay(run, 1, 0, ask=lambda what: said.append(what) or False).agrees,
    ):
        if code:
            with pytest.raises(InputError) as error:
                call()
            said.append(str(error.value))
        else:
            assert call() in (0, True)
        assert not (tmp_path / "ran").exists()
    assert not code or words in "\n".join(said), said


def test_networks_of_torch_need_no_permission(tmp_path):
    write_small(tmp_path)
    model = {"factory": "torch.nn:Linear", "args": {"in_features": 12, "out_features": 4}}
    run = hpcfed.run(small(tmp_path / "run", data=str(tmp_path / "small.h5"), model=model), quiet=True).folder
    assert verify(Verification(run, None, 0), World(), lambda text: None) == 0


def test_variables_in_paths_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_A_USER", str(tmp_path))
    assert load_recipe(small("run", data="$OF_A_USER/small.h5")).data == tmp_path / "small.h5"


def test_names_in_tables_are_written_as_they_are(tmp_path):
    path = write_small(tmp_path)
    with h5py.File(path, "r+") as file:
        names = [b"=1+1", b"+x", b"-y", b"@z", b"plain"]
        file["train/client"] = names
    recipe = small(tmp_path / "run", data=str(path), evaluate={"clients": {"every": 3}})
    run = hpcfed.run(recipe, quiet=True).folder
    with (run / "clients.csv").open(encoding="utf-8", newline="") as table:
        assert {row["name"] for row in csv.DictReader(table)} == {name.decode() for name in names}
