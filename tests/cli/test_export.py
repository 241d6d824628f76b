"""`hpcfed export`: files that predict what hpcfed does, bit for bit, and a model card."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hpcfed
from hpcfed.cli.main import main
from hpcfed.data.federation import Federation
from hpcfed.data.shards import Shards
from tests.federations import blobs, write_federation
from tests.mpi.recipes import small

pytestmark = [pytest.mark.one_mpi, pytest.mark.filterwarnings("ignore:.*the model is code")]

NETS = str(Path(__file__).parents[1] / "mpi")
SITES = ("Praha | St. <b>", "Ålesund", "Zürich")
FEDBN = {"private": ["2.*"]}
OF_SITES = {"every": 1, "model": "last-two", "metrics": ["f1-macro"], "clients": {"every": 1}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with three sites by name that have test sets in ``small.h5``."""
    write_federation(tmp_path / "small.h5", **blobs(3), content="three")
    with h5py.File(tmp_path / "small.h5", "r+") as file:
        file["test/offsets"] = np.array([0, 20, 30, len(file["test/y"])])
        file["train/client"] = np.array([name.encode() for name in SITES])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(**changes: Any) -> None:
    hpcfed.run(small("run", name="three", evaluate=OF_SITES, **changes), quiet=True)


def exported(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Return exit code and output of ``hpcfed export run``."""
    with pytest.raises(SystemExit) as ended:
        main(["export", "run", *words])
    return int(ended.value.code or 0), "".join(capfd.readouterr())


def inputs() -> torch.Tensor:
    with Federation.open("small.h5") as federation:
        return torch.tensor(federation.test(0, federation.num_test)[0])


def check_file(path: str, kind: str, module: nn.Module) -> None:
    """Check that the file predicts what the module does, in batches of any size."""
    if kind == "torchscript":
        again: Any = torch.jit.load(path)
    else:
        tensors = load_file(path) if kind == "safetensors" else torch.load(path, weights_only=True)
        again = module
        expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        for tensor in module.state_dict().values():
            tensor.zero_()
        again.load_state_dict(tensors)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())
    x = inputs()
    with torch.no_grad():
        for size in (1, 3, len(x)):
            for _ in range(3):  # an optimising executor changes its program after a call or two
                assert torch.equal(again(x[:size]), hpcfed.load("run").evaluated(x[:size]))


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", ["safetensors", "state_dict", "torchscript"])
def test_a_file_predicts_what_hpcfed_does(kind, folder, capfd):
    trained()
    code, said = exported(capfd, "--format", kind, "-o", "out/model.x")
    assert (code, said) == (0, "wrote out/model.x\nwrote out/model.input.json\nwrote out/model.md\n")
    check_file("out/model.x", kind, hpcfed.load("run").evaluated)


def test_a_site_has_its_private_part(folder, capfd):
    trained(parameters=FEDBN, model={"factory": "nets:mlp"}, python_path=[NETS])
    x, own = inputs(), hpcfed.load("run").evaluated_of(1)
    assert exported(capfd, "--site", "Ålesund")[0] == 0
    assert all(torch.equal(tensor, own.state_dict()[name]) for name, tensor in load_file("three-1.safetensors").items())
    assert exported(capfd, "--site", "1", "--format", "torchscript")[0] == 0
    with torch.no_grad():
        assert torch.equal(torch.jit.load("three-1.torchscript.pt")(x), own(x))
        assert not torch.equal(hpcfed.load("run").evaluated_of(0)(x), own(x))
    assert "private parts of Ålesund.\n" in Path("three-1.md").read_text()
    (folder / "run" / "private" / "client-2.safetensors").unlink()  # as where no cohort included it
    assert exported(capfd, "--site", "2")[0] == 0
    assert "never drawn: initial values.\n" in Path("three-2.md").read_text()
    assert exported(capfd)[0] == 0
    assert {name.split(".")[0] for name in load_file("three.safetensors")} == {"1", "4"}
    assert "5 tensors are private to each site" in Path("three.md").read_text()


def test_the_card_has_data_sites_metrics_and_digests(folder, capfd):
    trained()
    assert exported(capfd)[0] == 0
    card, run = Path("three.md").read_text(), hpcfed.load("run")
    rows = {line.split(" | ")[0].lstrip("| "): line for line in card.splitlines() if line.startswith("| ")}
    assert hashlib.sha256(Path("three.safetensors").read_bytes()).hexdigest() in rows["SHA-256"]
    with Federation.open("small.h5") as federation:
        assert federation.content in rows["content"]
        sizes = federation.sizes.tolist()
    loss = {
        row["client"]: row["loss"] for row in run.clients.query("round == 3 and split == 'test'").to_dict("records")
    }
    assert (
        rows["Ålesund"]
        == f"| Ålesund | {sizes[1]} | 10 | {rows['Ålesund'].split(' | ')[3]} | {loss[1]:.4g} | "
        + (rows["Ålesund"].split(" | ")[5])
    )
    assert r"| Praha \| St. &lt;b>" in card
    assert rows["test_f1-macro"] == f"| test_f1-macro | {run.metrics['test_f1-macro'].iloc[-1]:.4g} | 3 |"
    certificate = Path("run/certificate.json").read_text()
    assert card.split("chain `")[1][:64] in certificate
    assert run.metrics["hash"].iloc[-1] in card
    assert "algorithm:\n  name: fedavg" in card
    assert str(folder) not in card.partition("## Cite")[0]
    assert "mcmahan" in card.lower()


@pytest.mark.soak
def test_a_card_lists_all_formats_of_its_model(folder, capfd):
    trained()
    assert exported(capfd)[0] == 0
    first = Path("three.md").read_text()
    wrote = "wrote three.pt\nwrote three.input.json\nwrote three.md\n"
    assert exported(capfd, "--format", "state_dict") == (0, wrote)
    card = Path("three.md").read_text()
    for name in ("three.safetensors", "three.pt"):
        assert f'("{name}"' in card
        assert hashlib.sha256(Path(name).read_bytes()).hexdigest() in card
    assert exported(capfd)[1] == "hpcfed: three.safetensors: exists; choose another --output, or add --overwrite\n"
    assert exported(capfd, "--overwrite")[0] == 0
    assert len(Path("three.md").read_text().splitlines()) == len(card.splitlines())
    wrote = "wrote three.torchscript.pt\nwrote three.input.json\nwrote three.md\n"
    assert exported(capfd, "--format", "torchscript") == (0, wrote)
    assert len(first.splitlines()) < len(card.splitlines())


def test_a_card_says_whose_model_sites_were_measured_with(folder, capfd):
    clients = {"every": 1, "models": ["fine-tuned"], "fine_tune": {"steps": 2, "lr": 0.1}}
    hpcfed.run(small("run", name="three", evaluate={"clients": clients}), quiet=True)
    assert exported(capfd)[0] == 0
    note = "Measured on each site's test samples after round 3, with the fine-tuned model of each, not the common one."
    assert note in Path("three.md").read_text().splitlines()


@pytest.mark.parametrize("models", [["global", "personal"], ["global"]])
def test_the_card_of_a_personal_model_has_its_own_scores_or_says_whose_they_are(models, folder, capfd):
    evaluate = {"every": 1, "clients": {"every": 1, "models": models}}
    hpcfed.run(small("run", name="three", evaluate=evaluate, algorithm={"name": "ditto", "mu": 0.1}), quiet=True)
    table = hpcfed.load("run").clients.query("round == 3 and split == 'test' and client == 1").set_index("model")
    for words, model in (((), "global"), (("--site", "1"), models[-1])):
        assert exported(capfd, *words)[0] == 0
        card = Path("three-1.md" if words else "three.md").read_text()
        row = next(line for line in card.splitlines() if line.startswith("| Ålesund |"))
        assert f"| {table['loss'][model]:.4g} |" in row
        assert ("with the personal model of each." in card) == (model == "personal")
        assert ("with the common model, not the personal one." in card) == (bool(words) and model == "global")
        assert ("Of the common model, not of this personal one." in card) == bool(words)


def test_a_later_version_adds_a_format_to_a_card(folder, capfd, monkeypatch):
    """A card names the version that trained the model, so it is known again; and the sites that took part."""
    trained(cohort={"without": ["Zürich"]})
    assert exported(capfd)[0] == 0
    trained_on = "Trained by simulated federated learning on 2 sites for 3 rounds, without Zürich"
    first = f"{trained_on}, with hpcfed {hpcfed.__version__}."
    assert first in Path("three.md").read_text().splitlines()
    monkeypatch.setattr(sys.modules["hpcfed.lab.export.card"], "__version__", "9.9")
    assert exported(capfd, "--format", "state_dict")[0] == 0
    card = Path("three.md").read_text()
    assert first in card.splitlines()
    assert "three.safetensors" in card
    assert "three.pt" in card


def test_a_card_with_notes_or_of_another_run_stays(folder, capfd):
    trained()
    assert exported(capfd)[0] == 0
    notes = Path("three.md").read_text() + "\nApproved.\n"
    Path("three.md").write_text(notes)
    assert exported(capfd, "--format", "state_dict")[1].startswith("hpcfed: three.md: exists; ")
    assert Path("three.md").read_text() == notes
    assert exported(capfd, "--overwrite")[0] == 0
    Path("three.input.json").write_text("{}\n")
    assert exported(capfd, "--format", "state_dict")[1].startswith("hpcfed: three.input.json: exists; ")
    assert exported(capfd, "--format", "state_dict", "--overwrite")[0] == 0
    Path("three.pt").unlink()
    hpcfed.run(small("run", name="three", evaluate=OF_SITES, seed=5), quiet=True, fresh=True)
    assert exported(capfd, "--format", "state_dict")[1].startswith("hpcfed: three.md: exists; ")
    assert not Path("three.pt").exists()


def tables(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Write two hospitals' tables of 14 numbers, a ward and an outcome, some cells empty; return their rows."""
    rng = np.random.default_rng(4)
    folder.mkdir()
    names = [f"lab{k}" for k in range(14)]
    hospitals = {}
    for number, name in enumerate(("north", "south")):
        cells = rng.normal(100 * number, 1 + np.arange(14), (20, 14)).round(3)
        rows = [dict(zip(names, map(str, row), strict=True)) for row in cells.tolist()]
        for k, row in enumerate(rows):
            row |= {"ward": "I" if k < 12 else "II", "outcome": ("ill", "well")[k % 2]}
        rows[0]["lab3"] = rows[1]["ward"] = ""
        lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
        (folder / f"{name}.csv").write_text("\n".join(lines))
        hospitals[name] = rows
    return hospitals


def by_hand(row: Mapping[str, str], steps: Mapping[str, Any], site: str) -> list[float]:
    """Return the model's input from a table's row by an ``.input.json`` alone."""
    fill, categories = steps["fill"], steps["categories"].items()
    levels = {f"{column}={level}": (column, level) for column, of_column in categories for level in of_column}
    x = []
    for name in steps["features"]:
        column, level = levels.get(name, (name, None))
        if level is not None:
            x.append(float(row[column] == level if row[column] else name in fill["most frequent"]))
        else:
            x.append(float(row[name] or fill["median"][name]))
    scale = steps["scaling"]
    scale = scale if "mean" in scale else next(one for one in scale["sites"] if one["name"] == site)
    return [(value - m) / s for value, m, s in zip(x, scale["mean"], scale["std"], strict=True)]


@pytest.mark.parametrize("standardize", ["pooled", "client"])
def test_rows_are_prepared_by_what_is_beside_the_model(standardize, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    rows = tables(tmp_path / "raw")
    words = ["--missing", "median", "--standardize", standardize, "--test-fraction", "0.25", "-o", "small.h5"]
    with pytest.raises(SystemExit):
        main(["prepare", "own", "--raw", "raw", *words])
    trained()
    assert exported(capfd)[0] == 0
    steps, card = json.loads(Path("three.input.json").read_text()), Path("three.md").read_text()
    assert (steps["classes"], steps["dtype"], steps["shape"]) == (["ill", "well"], "float32", [16])
    with Federation.open("small.h5") as federation, h5py.File("small.h5", locking=False) as file:
        prepared = Shards(federation, torch.float32, torch.device("cpu"), 0)
        for k, name in enumerate(rows):
            own = slice(*federation.offsets[k : k + 2])
            expected = [by_hand(rows[name][row[1]], steps, name) for row in file["train/row"][own]]
            np.testing.assert_allclose(prepared.client(k)[0], expected, rtol=1e-4, atol=1e-5)
    lines = [line for line in card.splitlines() if "scaled input" in line]
    assert len(lines) == 1
    assert lines[0].startswith("| scaling | the model expects scaled input: (x − mean) / std")
    ends = {"pooled": " and 4 more |", "client": ", by mean and std of each site's own training samples |"}
    assert lines[0].endswith(ends[standardize])
    median = f"lab3 {steps['fill']['median']['lab3']:g}; by the most frequent level, ward=I"
    filled = f"the model expects them filled, before scaling: by the median of training rows, {median}"
    assert f"| missing values | {filled} |" in card
    digest = hashlib.sha256(Path("three.input.json").read_bytes()).hexdigest()
    assert f"| preparation of input | `three.input.json`: all names and numbers; SHA-256 `{digest}` |" in card


def test_the_preparation_of_images(folder, capfd):
    with h5py.File("small.h5", "r+") as file:
        for part in ("train/x", "test/x"):
            x = file[part][:]
            del file[part]
            file[part] = np.clip(40 * x + 128, 0, 255).astype(np.uint8)
        file.attrs["normalization"] = '{"mean": [0.5], "std": [0.25]}'
    trained()
    assert exported(capfd)[0] == 0
    steps = json.loads(Path("three.input.json").read_text())
    assert (steps["divide_by"], steps["scaling"]) == (255, {"mean": [0.5], "std": [0.25]})
    scaled = "the model expects scaled input: (x / 255 − mean) / std; mean 0.5; std 0.25"
    assert f"| scaling | {scaled} |" in Path("three.md").read_text()


def test_sites_that_were_scaled_before_another_partition(folder, capfd):
    by = "each client of sites.h5 by its own training rows"
    with h5py.File("small.h5", "r+") as file:
        file.attrs["normalization"] = '{"mean": [0.0], "std": [1.0]}'
        file.attrs["source"] = json.dumps({"standardized": by})
    trained()
    assert exported(capfd)[0] == 0
    assert json.loads(Path("three.input.json").read_text())["scaling"] == {"by": by}
    assert f"| scaling | the model expects scaled input: (x − mean) / std, {by} |" in Path("three.md").read_text()


WRONG: Mapping[str, tuple[list[str], str]] = {
    "no-private-part": (["--site", "0"], "--site 0: the model has no private part"),
    "the-cards-place": (["-o", "model.md"], "the place of the model card"),
    "exists": (["-o", "small.h5"], "small.h5: exists; choose another --output, or add --overwrite"),
    "no-format": (["--format", "onnx"], "'onnx' is not one of 'safetensors', 'state_dict', 'torchscript'"),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_in_one_line(case, folder, capfd):
    trained()
    words, says = WRONG[case]
    code, said = exported(capfd, *words)
    assert (code, said.count("\n")) == (2, 1)
    assert says in said


def test_a_model_that_cannot_be_traced_or_misses_its_site_is_refused(folder, capfd):
    assert exported(capfd)[1] == f"hpcfed: {folder}/run: not a run folder; name the output folder of a run\n"
    trained(parameters=FEDBN, model={"factory": "nets:mlp"}, python_path=[NETS])
    code, said = exported(capfd, "--format", "torchscript")
    assert (code, "name a client by --site" in said) == (2, True)
    code, said = exported(capfd, "--site", "Zurich")
    assert (code, "did you mean 'Zürich'?" in said) == (2, True)
    (folder / "odd.py").write_text(
        "from torch import nn\nclass Odd(nn.Linear):\n    def __init__(self): super().__init__(12, 4)\n"
        "    def forward(self, x): return super().forward(x) * len(x)\n"
    )
    hpcfed.run(small("run", name="odd", model={"factory": "odd:Odd"}), quiet=True, fresh=True)
    code, said = exported(capfd, "--format", "torchscript")
    assert (code, "the traced module predicts other values" in said) == (2, True)
    assert not list(folder.glob("odd*.pt"))


def test_a_model_whose_code_has_changed_is_refused(folder, capfd):
    """Its parameters fit other code, too, which would predict something else."""
    code = "from torch import nn\ndef net(): return nn.Sequential(nn.Linear(12, 8), nn.{}(), nn.Linear(8, 4))\n"
    (folder / "changing.py").write_text(code.format("Tanh"))
    result = hpcfed.run(small("run", name="changing", model={"factory": "changing:net"}), quiet=True)
    assert isinstance(result.module[1], nn.Tanh)
    (folder / "changing.py").write_text(code.format("Sigmoid"))
    sys.modules.pop("changing")
    with pytest.raises(hpcfed.InputError, match=r"code is another than this run's: changing\.py differs from line 2"):
        hpcfed.load("run").evaluated.eval()
    assert isinstance(hpcfed.load("run", accept_code=True).evaluated[1], nn.Sigmoid)
    said = exported(capfd)
    assert said[0] == 2
    assert "--accept-code" in said[1]
    assert exported(capfd, "--accept-code")[0] == 0
