"""The cost model between hosts: fitted on one network, compared with measurements on another; not a test.

    python -m tests.network.predict [WORKLOAD…]          mlp cnn logistic; some minutes

Fitted to 1 and 2 ranks at 100 Mbit/s and 1 ms. Predicted: 2 ranks at a tenth of the rate and ten times the delay, with
the network measured there by ``hpcfed doctor`` and, apart from that, as its rate and delay are known; and 4 ranks.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from hpcfed.lab.bench.workloads import WORKLOADS, write_workload
from hpcfed.lab.scaling.measure import RankTimes, read
from hpcfed.lab.scaling.model import CostModel, TestedPrediction, bytes_of, fit, held_out_errors
from hpcfed.lab.scaling.network import parse_network
from tests.network.conftest import succeeded
from tests.network.hosts import Hosts, hosts

NEAR, FAR = (100e6, 0.001), (10e6, 0.01)
ROUNDS = 5
HPCFED = (sys.executable, "-m", "hpcfed")


def main(names: Sequence[str] = ("mlp", "cnn", "logistic")) -> None:
    """Print each prediction beside its measurement, and the medians of their errors."""
    errors: dict[str, list[float]] = {}
    with hosts(4) as network:
        far = _doctor(network)
        for name in names:
            with tempfile.TemporaryDirectory() as scratch:
                for what, entry in _compared(network, Path(scratch), name, far):
                    errors.setdefault(what, []).append(entry.error)
                    times = f"measured {1e3 * entry.measured:9.2f} ms, predicted {1e3 * entry.predicted:9.2f} ms"
                    print(f"{WORKLOADS[name].letter}  {what:34}  cohort {entry.cohort:3g}  {times}  {entry.error:+.0%}")
                    sys.stdout.flush()
    for what, found in errors.items():
        sizes = [abs(error) for error in found]
        print(f"median |error|, {what}: {median(sizes):.1%}, largest {max(sizes):.1%} of {len(sizes)}")


def _doctor(network: Hosts) -> CostModel:
    """Return the far network as the doctor measures it, in a model of costs that are zero."""
    network.link(*FAR)
    command = [*network.mpirun(sys.executable, 2, ["h1", "h2"]), *HPCFED, "doctor", "--json"]
    report = network.folder / "doctor.json"
    report.write_text(succeeded(network.call(command, network.folder)).stdout)
    print(json.dumps({name: json.loads(report.read_text())["measured"][name] for name in ("allreduce", "ping_pong")}))
    found = parse_network(str(report))
    print(f"far: {found.source}: {1e3 * found.latency:.2f} ms, {8e-6 / found.byte:.2f} Mbit/s")
    return CostModel(0, 0, 0, found.latency, found.byte)


def _compared(network: Hosts, folder: Path, name: str, far: CostModel) -> Sequence[tuple[str, TestedPrediction]]:
    write_workload(name, folder)
    near = [_measure(network, folder, name, ranks, NEAR) for ranks in (1, 2)]
    model = fit(near)
    known = model.on(FAR[1], 8 / FAR[0])
    print(f"{WORKLOADS[name].letter}  {model}")
    slow, more = _measure(network, folder, name, 2, FAR), _measure(network, folder, name, 4, NEAR)
    both = _measure(network, folder, name, 4, FAR)
    rows = [("held out, same network", entry) for entry in held_out_errors(near) if "cohort" in entry.what]
    for what, measured, by in (
        ("rate / 10, delay x 10, measured", slow, model.on(far.latency, far.byte)),
        ("rate / 10, delay x 10, given", slow, known),
        ("ranks x 2", more, model),
        ("all three, measured", both, model.on(far.latency, far.byte)),
    ):
        rows += [
            (what, TestedPrediction(what, 0, one.cohort, one.seconds["total"], by.of(one))) for one in measured.samples
        ]
    return rows


def _measure(network: Hosts, folder: Path, name: str, ranks: int, link: tuple[float, float]) -> RankTimes:
    network.link(*link)
    output = folder / f"{ranks}-{link[0]:.0f}"
    recipe = ["scale", "recipe.yaml", f"cohort={WORKLOADS[name].cohort}", "--here", "--rounds", str(ROUNDS)]
    launch = network.mpirun(sys.executable, ranks, network.names[:ranks])
    succeeded(network.call([*launch, *HPCFED, *recipe, "--output", str(output)], folder, timeout=300))
    found = read(output, ranks)
    assert found is not None
    for one in found.samples:
        seconds = {timer: round(1e3 * value, 1) for timer, value in one.seconds.items()}
        print(f"   {ranks} ranks, {link[0] / 1e6:g} Mbit/s, cohort {one.cohort:g}: {seconds} ms; {bytes_of(one):.0f} B")
    print("   Allreduce:", [(size, round(1e3 * value, 2)) for size, value in found.allreduce], flush=True)
    return found


if __name__ == "__main__":
    main(*([sys.argv[1:]] if sys.argv[1:] else []))
