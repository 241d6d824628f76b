"""Bits under other instruction sets and libraries, on this machine: which operations differ, and do tiles hold.

    python jobs/bench/bits.py                       # ten minutes: two processes for each setting
    python jobs/bench/bits.py --examples 0          # a minute: operations alone
    python jobs/bench/bits.py --only ENABLE --examples 2000
    python jobs/bench/bits.py --only ATEN,MKL       # settings whose names contain one of these words
    python jobs/bench/bits.py --json bits.json      # the table as numbers, too
    python jobs/bench/bits.py --cost                # in place of it, the cost of ``bits: portable``, as ratios

Every operation runs forward and backward on the same seeded inputs in a child process for each setting, on one thread,
and its outputs are hashed. A cell is ``=`` where all bits are those of the first column, else the largest difference,
in ulp of the output's largest entry. Sizes are awkward on purpose: odd, of one sample, shorter than a vector register.

Then a client's bits are compared in random arrangements of a cohort (`tests/contract/test_tiles.py`), under each
setting: no setting may let them depend on neighbours, whatever it does to operations. The oldest show what others hide.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hpcfed import algorithms, models
from hpcfed.algorithms.fednova import PerStep
from hpcfed.arithmetic.elementary import sqrt
from hpcfed.arithmetic.operations import PORTABLE
from hpcfed.arithmetic.sums import squared_norm
from hpcfed.client.batched.matmul import matmul_for
from hpcfed.client.batched.networks import network_of
from hpcfed.client.batched.portable import PortableNetwork
from hpcfed.client.batched.solver import StackedSolver
from hpcfed.client.optimizers import optimizer_for
from hpcfed.client.solver import SequentialSolver, Stepping, Task
from hpcfed.config.recipe import Algorithm, Local, Model
from hpcfed.models.flat import FlatModel
from hpcfed.models.losses import LOSSES
from hpcfed.models.portable import portable_loss
from hpcfed.ranks.cpu import cpu_model
from hpcfed.ranks.platform import onednn
from hpcfed.reduce.exact import ExactSum
from hpcfed.types import Means, RoundContext, Tilt

NO_FMA = "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F,-AVX2_Usable,-FMA_Usable"
SIMD = np.show_config("dicts")["SIMD Extensions"]
DISPATCHED = (*SIMD.get("found", ()), *SIMD.get("not found", ()))
"""Instruction sets beyond its baseline that NumPy was built for, whether or not this processor has them."""
OLDEST = {
    "ATEN default": {"ATEN_CPU_CAPABILITY": "default"},
    "MKL COMPATIBLE": {"MKL_CBWR": "COMPATIBLE"},
    "oneDNN SSE41": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "NumPy, OpenBLAS": {"NPY_DISABLE_CPU_FEATURES": " ".join(DISPATCHED), "OPENBLAS_CORETYPE": "Nehalem"},
    "C library": {"GLIBC_TUNABLES": NO_FMA},
}
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "as it is": {},
    **OLDEST,
    "ATEN avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "ATEN avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "MKL AVX2": {"MKL_CBWR": "AVX2"},
    "MKL AVX512": {"MKL_CBWR": "AVX512"},
    "MKL AUTO": {"MKL_CBWR": "AUTO"},
    **{f"MKL ENABLE {name}": {"MKL_ENABLE_INSTRUCTIONS": name} for name in ("SSE4_2", "AVX", "AVX2", "AVX512")},
    "oneDNN AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "oneDNN AVX512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "all oldest": {key: value for setting in OLDEST.values() for key, value in setting.items()},
}
"""Column → the environment of its process, added to this one's."""
BATCHES = 1, 7, 50
ROOT = Path(__file__).resolve().parents[2]
Outputs = dict[str, Tensor]
Operation = Callable[[torch.Generator], Outputs]


def drawn(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers between −4 and 4 with whole mantissas, from integers: the same under every setting."""
    return (torch.randint(-(1 << 54), 1 << 54, shape, generator=rng).double() / (1 << 52)).to(dtype)


def elementwise(function: Callable[..., Tensor], inputs: int, *, positive: bool = False) -> Operation:
    """Return an operation on vectors of lengths around those of vector registers, in both types."""

    def operation(rng: torch.Generator) -> Outputs:
        found = {}
        for dtype in (torch.float32, torch.float64):
            for length in (1, 5, 33, 1001, 100_001):
                given = [drawn(rng, length, dtype=dtype) for _ in range(inputs)]
                given = [each.abs() + 0.01 for each in given] if positive else given
                found[f"{dtype} {length}"] = function(*given)
        return found

    return operation


def layer(build: Callable[[], nn.Module], *shape: int, dtype: torch.dtype = torch.float32) -> Operation:
    """Return the output and all gradients of a module on minibatches of several sizes, of samples of that shape."""

    def operation(rng: torch.Generator) -> Outputs:
        module, found = build().to(dtype), {}
        for parameter in module.parameters():
            parameter.data = drawn(rng, *parameter.shape, dtype=dtype) / 16
        for batch in BATCHES:
            if batch == 1 and isinstance(module, nn.BatchNorm2d):
                continue
            x = drawn(rng, batch, *shape, dtype=dtype).requires_grad_()
            output = module(x)
            output.backward(drawn(rng, *output.shape, dtype=dtype))
            found |= gradients(module, f"{batch}", output) | {f"{batch} input": x.grad}
        return found

    return operation


def gradients(module: nn.Module, where: str, output: Tensor) -> Outputs:
    """Return an output and the module's gradients, which are then forgotten."""
    found = {f"{where} output": output.detach()}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[f"{where} {name}"] = parameter.grad
            parameter.grad = None
    return found


def network(
    section: Mapping[str, object], features: tuple[int, ...], outputs: int, batches: tuple[int, ...]
) -> Operation:
    """Return the loss, the output and all gradients of a shipped model, by autograd, dropout off."""

    def operation(rng: torch.Generator) -> Outputs:
        spec = models.spec(Model(**section))
        assert spec is not None
        module, found = spec.build(features, outputs).eval(), {}
        for parameter in module.parameters():
            parameter.data = drawn(rng, *parameter.shape) / (4 * max(1, parameter[0].numel()) ** 0.5)
        for batch in batches:
            x = drawn(rng, batch, *features)
            if spec.tokens:
                x = torch.randint(0, outputs, (batch, *features), generator=rng)
            y = torch.randint(0, outputs, (batch,), generator=rng)
            output = module(x)
            loss = nn.functional.cross_entropy(output, y)
            loss.backward()
            found |= gradients(module, f"{batch}", output) | {f"{batch} loss": loss.detach()}
        return found

    return operation


def loss(name: str) -> Operation:
    """Return a loss, each sample's and the minibatch's, and its gradient."""

    def operation(rng: torch.Generator) -> Outputs:
        found = {}
        for dtype in (torch.float32, torch.float64):
            for batch, classes in ((1, 2), (50, 10), (7, 33)):
                z = drawn(rng, batch, classes, dtype=dtype).requires_grad_()
                y = torch.randint(0, classes, (batch,), generator=rng)
                if name != "cross-entropy":
                    y = (drawn(rng, batch, classes, dtype=dtype) > 0).to(dtype)
                value = LOSSES[name]("mean").batch(z, y)
                value.backward()
                where = f"{dtype} {batch}"
                found |= {f"{where} loss": value.detach(), f"{where} gradient": z.grad}
                with torch.no_grad():
                    found[f"{where} each"] = LOSSES[name]("mean").each(z, y)
        return found

    return operation


def solve(
    engine: str, matmul: str, hidden: tuple[int, ...], dtype: torch.dtype, *, portable: bool = False
) -> Operation:
    """Return Δ of three clients after some steps of the local solver."""

    def operation(rng: torch.Generator) -> Outputs:
        widths = [61, *hidden, 5] if matmul == "blas" else [784, *hidden, 10]
        layers = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
        model = FlatModel(nn.Sequential(*layers[:-1]), dtype, torch.device("cpu"))
        cross_entropy = LOSSES["cross-entropy"]("mean")
        w = drawn(rng, model.vector.numel(), dtype=dtype) / 64
        section = Local(steps=4, batch_size=50, lr=0.1, weight_decay=1e-3, engine=engine, matmul=matmul)
        samples = [
            (drawn(rng, n, widths[0], dtype=dtype), torch.randint(0, widths[-1], (n,), generator=rng))
            for n in (3, 77, 120)
        ]
        tasks = [Task(k, own, Tilt(), 4, 0.0) for k, own in enumerate(samples)]
        solver: SequentialSolver | StackedSolver
        about = {"tile": len(tasks), "width": 50, "most_steps": 4}
        if portable:
            network = PortableNetwork(portable_loss("cross-entropy", cross_entropy))
            solver = StackedSolver(model, network, section, 0, **about, arithmetic=PORTABLE)
        elif engine == "sequential":
            solver = SequentialSolver(model, cross_entropy, section, 0, draws=False)
        else:
            products = matmul_for(matmul, model.vector)
            perceptron = network_of(model, cross_entropy, tasks[0].samples[0][:1], 50, products)
            solver = StackedSolver(model, perceptron, section, 0, **about)
        return {f"client {k}": local.delta.clone() for k, local in enumerate(solver.solve(w, tasks, 1))}

    return operation


def client_optimizer(name: str, **keys: float) -> Operation:
    """Return a vector after five steps of a client optimizer along seeded gradients."""

    def operation(rng: torch.Generator) -> Outputs:
        y = drawn(rng, 1001)
        optimizer = optimizer_for(Local(steps=1, optimizer=name, **keys), y)
        for step in range(1, 6):
            optimizer.move(y, drawn(rng, 1001), optimizer.numbers(0.1, step))
        return {"y": y}

    return operation


def reduction(rng: torch.Generator) -> Outputs:
    """The integers of an exact sum."""
    integers = torch.zeros(2, 1001, dtype=torch.int64)
    total = ExactSum(integers, (2.0**-30, 2.0**-70))
    total.begin(integers, (2.0**-30, 2.0**-70))
    for _ in range(3):
        total.add(drawn(rng, 1001), 0.3)
    total.settle()
    return {"high": integers[0].double(), "low": integers[1].double()}


def norms(rng: torch.Generator) -> Outputs:
    """‖Δ_i‖² of the reduction."""
    vectors = [drawn(rng, length, dtype=torch.float64) for length in (5, 33, 4810, 100_001)]
    return {f"{len(v)}": torch.dot(v, v).reshape(1) for v in vectors}


def server(rng: torch.Generator) -> Outputs:
    """The next models and states of all methods' server steps, given the same means."""
    return {f"{name} {part}": tensor for name in algorithms.names() for part, tensor in server_steps(name, rng)}


def server_steps(name: str, rng: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yield the model and the states after three server steps of a method."""
    parameters = dict(algorithms.examples()[name])
    if name in ("fedadam", "fedyogi"):
        parameters["debias"] = "adam"
    method = algorithms.build(Algorithm(name=name, **parameters), [])
    w, delta = (drawn(rng, 1001, dtype=torch.float64) for _ in range(2))
    vectors = {"delta": delta, **dict.fromkeys(method.local.vectors(True), delta / 3)}
    state, shared = method.server.begin(w), method.local.begin_shared(w)
    for round in range(1, 4):
        means = Means(vectors, 3.7, squared_norm(delta), 0.3, 3, round, 0.1, 7.0)
        update = method.server.step(w, state, means, RoundContext(round, 0.1))
        w, state, shared = update.w, update.state, method.local.share(shared, means)
    yield "w", w
    for key, tensor in (*state.items(), *((f"shared {key}", tensor) for key, tensor in shared.items())):
        yield key, tensor.reshape(-1)


def initial(section: Mapping[str, object]) -> Operation:
    """Return the parameters of a shipped model, drawn from torch's generator."""

    def operation(rng: torch.Generator) -> Outputs:
        spec = models.spec(Model(**section))
        assert spec is not None
        torch.manual_seed(0)
        return {name: p.detach() for name, p in spec.build((3, 28, 28), 10).named_parameters()}

    return operation


def shared(rng: torch.Generator) -> Outputs:
    """Step sizes, effective steps and FedNova's factors, which every rank computes by itself."""
    found: dict[str, list[float]] = {"lr": [], "steps": [], "factors": []}
    for decay in (0.9, 0.998, 0.99999):
        stepping = Stepping(Local(steps=1, lr=0.1, lr_decay=decay, momentum=0.7))
        found["lr"] += [stepping.lr(round) for round in range(1, 3001)]
        found["steps"] += [stepping.effective_steps(t, 5.0 * t, round=t, mu=0.3) or 0.0 for t in range(1, 101)]
    for size in (2, 3, 9, 20, 100, 1001):
        steps = torch.randint(1, 99, (size,), generator=rng).numpy()
        shares, effective = (
            np.full(size, 1 / size),
            steps * torch.rand(size, generator=rng, dtype=torch.float64).numpy(),
        )
        for tau_eff in ("norm", "steps"):
            found["factors"] += PerStep(tau_eff=tau_eff).factors(effective, steps, shares, 0.0).tolist()
    return {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in found.items()}


def of_numpy(function: Callable[[np.ndarray], object]) -> Operation:
    """Return a function of NumPy on vectors."""

    def operation(rng: torch.Generator) -> Outputs:
        found = {}
        for length in (5, 33, 1001, 100_001):
            value = np.atleast_1d(function(drawn(rng, length, dtype=torch.float64).numpy()))
            found[f"{length}"] = torch.from_numpy(np.ascontiguousarray(value, dtype=np.float64))
        return found

    return operation


IMAGES, SMALL_IMAGES = (3, 32, 32), (1, 28, 28)
OPERATIONS: Mapping[str, Operation] = {
    "a + b, a − b, a · b, a / b": elementwise(lambda a, b: torch.cat([a + b, a - b, a * b, a / b]), 2),
    "square root": elementwise(torch.sqrt, 1, positive=True),
    "square root of server steps": elementwise(sqrt, 1, positive=True),
    "a + α b in one call": elementwise(lambda a, b: torch.add(a, b, alpha=-0.1), 2),
    "lerp, addcmul, addcdiv": elementwise(
        lambda a, b, c: torch.cat([torch.lerp(a, b, 0.1), a.addcmul(b, c, value=0.3), a.addcdiv(b, c, value=0.3)]),
        3,
        positive=True,
    ),
    "exp": elementwise(torch.exp, 1),
    "log": elementwise(torch.log, 1, positive=True),
    "sigmoid, tanh": elementwise(lambda a: torch.cat([a.sigmoid(), a.tanh()]), 1),
    "softmax, log-softmax": elementwise(lambda a: torch.cat([a.softmax(0), a.log_softmax(0)]), 1),
    "sum": elementwise(lambda a: a.sum().reshape(1), 1),
    "dot product, norm": elementwise(lambda a: torch.stack([torch.dot(a, a), torch.linalg.vector_norm(a)]), 1),
    "linear layer, 33 → 9, float32": layer(lambda: nn.Linear(33, 9), 33),
    "linear layer, 33 → 9, float64": layer(lambda: nn.Linear(33, 9), 33, dtype=torch.float64),
    "linear layer, 784 → 10, float32": layer(lambda: nn.Linear(784, 10), 784),
    "convolution 3×3, 3 → 16": layer(lambda: nn.Conv2d(3, 16, 3, padding=1), 3, 13, 13),
    "max-pool 2×2": layer(lambda: nn.MaxPool2d(2), 3, 13, 13),
    "GroupNorm": layer(lambda: nn.GroupNorm(2, 6), 6, 7, 7),
    "BatchNorm": layer(lambda: nn.BatchNorm2d(6), 6, 7, 7),
    "cross-entropy": loss("cross-entropy"),
    "binary cross-entropy": loss("binary-cross-entropy"),
    "squared loss": loss("squared"),
    "model linear, logistic": network({"name": "logistic"}, (61,), 5, BATCHES),
    "model mlp 200, 100": network({"name": "mlp", "hidden": [200, 100]}, (784,), 10, BATCHES),
    "model emnist-cnn": network({"name": "emnist-cnn"}, SMALL_IMAGES, 10, (1, 7)),
    "model cifar-cnn": network({"name": "cifar-cnn"}, IMAGES, 10, (1, 7)),
    "model feddyn-cnn": network({"name": "feddyn-cnn"}, IMAGES, 10, (1, 7)),
    "model femnist-cnn": network({"name": "femnist-cnn"}, SMALL_IMAGES, 62, (1, 7)),
    "model resnet18-gn": network({"name": "resnet18-gn"}, IMAGES, 10, (2,)),
    "model lstm": network({"name": "lstm"}, (20,), 80, (1, 7)),
    "local steps, linear, sequential": solve("sequential", "blas", (), torch.float32),
    "local steps, linear, batched": solve("batched", "blas", (), torch.float32),
    "local steps, linear, batched, float64": solve("batched", "blas", (), torch.float64),
    "local steps, mlp, batched, matmul: blas": solve("batched", "blas", (200,), torch.float32),
    "local steps, mlp, batched, matmul: onednn": solve("batched", "onednn", (200,), torch.float32),
    "local steps, linear, bits: portable": solve("batched", "blas", (), torch.float32, portable=True),
    "local steps, linear, bits: portable, float64": solve("batched", "blas", (), torch.float64, portable=True),
    "client SGD, momentum": client_optimizer("sgd", momentum=0.9),
    "client Adam": client_optimizer("adam"),
    "client Yogi": client_optimizer("yogi"),
    "exact reduction": reduction,
    "norms ‖Δ‖²": norms,
    "server steps": server,
    "step sizes, effective steps, factors": shared,
    "initial model, linear": initial({"name": "linear"}),
    "initial model, feddyn-cnn": initial({"name": "feddyn-cnn"}),
    "NumPy: sum, mean, variance": of_numpy(lambda a: [a.sum(), a.mean(), a.var()]),
    "NumPy: a @ b": of_numpy(lambda a: a @ a[::-1].copy()),
    "NumPy: exp, log": of_numpy(lambda a: np.concatenate([np.exp(a), np.log(np.abs(a) + 0.01)])),
}


def compute(path: Path) -> None:
    """Compute all operations in this process, and keep their outputs."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = {}
    for number, (name, operation) in enumerate(OPERATIONS.items()):
        if "onednn" in name and onednn.hindrance(torch.empty(0)):
            continue
        for part, tensor in operation(torch.Generator().manual_seed(number)).items():
            found[f"{name}|{part}"] = tensor.detach().contiguous().clone()
    save_file(found, path, metadata={"instructions": torch.backends.cpu.get_cpu_capability()})


def outputs_under(environment: Mapping[str, str], folder: Path) -> dict[str, Tensor] | None:
    """Return all outputs of a child process; None if it cannot run under this setting."""
    path = folder / "outputs.safetensors"
    path.unlink(missing_ok=True)
    own = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, __file__, "--into", str(path)], env=own, check=False)
    return load_file(path) if done.returncode == 0 else None


def ulps(one: Tensor, other: Tensor) -> float:
    """Return the largest difference in ulp of the largest entry; inf where one is not finite."""
    if one.numel() == 0:
        return 0.0
    largest = float(one.abs().max())
    ulp = float(np.spacing(np.array(largest, one.numpy().dtype)))
    return float((one.double() - other.double()).abs().max()) / ulp


def hashed(outputs: Mapping[str, Tensor], name: str) -> str:
    """Return XXH3-64 of all outputs of an operation."""
    digest = xxhash.xxh3_64()
    for key in sorted(outputs):
        if key.partition("|")[0] == name:
            digest.update(outputs[key].numpy().tobytes())
    return digest.hexdigest()


def row(name: str, found: Mapping[str, dict[str, Tensor] | None]) -> Iterator[float | None]:
    """Yield an operation's largest difference from the first column under each setting; None where it did not run."""
    first, *others = found.values()
    for other in others:
        if first is None or other is None or not any(key.startswith(f"{name}|") for key in first):
            yield None
        elif hashed(first, name) == hashed(other, name):
            yield 0.0
        else:
            yield max(ulps(first[key], other[key]) for key in first if key.partition("|")[0] == name) or 1e-9


def tiles_under(environment: Mapping[str, str], examples: int) -> str:
    """Return how the property of tiles ends under a setting: "holds", or pytest's account of a counterexample."""
    own = {**os.environ, "OMP_NUM_THREADS": "1", "HPCFED_EXAMPLES": str(examples), **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contract/test_tiles.py"]
    done = subprocess.run(command, env=own, cwd=ROOT, check=False, capture_output=True, text=True)
    return "holds" if done.returncode == 0 else f"FAILS\n{done.stdout}{done.stderr}"


WORK = {  # features, classes, clients, samples of each, batch size, dtype
    "61 → 5, 20 clients, batch 5": (61, 5, 20, 100, 5, torch.float32),
    "61 → 5, 20 clients, batch 5, float64": (61, 5, 20, 100, 5, torch.float64),
    "784 → 10, 10 clients, batch 50": (784, 10, 10, 600, 50, torch.float32),
    "784 → 10, 10 clients, batch 50, float64": (784, 10, 10, 600, 50, torch.float64),
    "12 → 2, 5 clients, full batch of 60": (12, 2, 5, 60, 60, torch.float32),
}
TIMES = 7


def cost() -> None:
    """Print the time of a round's local steps, an epoch of each client, in portable arithmetic over that in native."""
    torch.set_num_threads(1)
    for name, (features, classes, clients, count, batch, dtype) in WORK.items():
        rng = torch.Generator().manual_seed(0)
        model = FlatModel(nn.Linear(features, classes), dtype, torch.device("cpu"))
        loss = LOSSES["cross-entropy"]("mean")
        section = Local(epochs=1, batch_size=batch, lr=0.01)
        own = [(drawn(rng, count, features, dtype=dtype), torch.randint(0, classes, (count,), generator=rng))] * clients
        tasks = [Task(k, samples, Tilt(), -(-count // batch), 0.0) for k, samples in enumerate(own)]
        w, about = model.vector.clone(), {"tile": clients, "width": batch, "most_steps": -(-count // batch)}
        perceptron = network_of(model, loss, own[0][0][:1], batch, matmul_for("blas", w))
        portable = portable_loss("cross-entropy", loss)
        solvers = (
            StackedSolver(model, perceptron, section, 0, **about),
            StackedSolver(model, PortableNetwork(portable), section, 0, **about, arithmetic=PORTABLE),
        )
        seconds: list[list[float]] = [[], []]
        for _ in range(TIMES + 1):
            for solver, times in zip(solvers, seconds, strict=True):
                started = time.process_time()
                for _ in solver.solve(w, tasks, 1):
                    pass
                times.append(time.process_time() - started)
        native, slow = (statistics.median(times[1:]) for times in seconds)
        print(f"{name:42} native {native * 1e3:7.2f} ms   portable {slow * 1e3:7.2f} ms   ratio {slow / native:5.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--into", type=Path, help="compute all operations in this process, into a safetensors file")
    parser.add_argument("--only", default="", help="settings whose names contain one of these words, with commas")
    parser.add_argument("--json", type=Path, help="write the table as numbers")
    parser.add_argument("--cost", action="store_true", help="time local steps of linear models in place of the table")
    parser.add_argument("--examples", type=int, default=40, help="of each kind of model, for the property of tiles")
    asked = parser.parse_args()
    if asked.cost:
        cost()
        return 0
    if asked.into is not None:
        compute(asked.into)
        return 0
    words = [word for word in asked.only.split(",") if word]
    settings = {k: v for k, v in SETTINGS.items() if not v or not words or any(word in k for word in words)}
    if words and len(settings) == 1:
        parser.error(f"no setting has one of {', '.join(words)}; settings: {', '.join([*SETTINGS][1:])}")
    print(
        f"{cpu_model()}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, numpy {np.__version__}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for name, environment in settings.items():
            print(f"{name} …", file=sys.stderr, flush=True)
            found[name] = outputs_under(environment, Path(folder))
    names = list(found)[1:]
    print("| | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    table = {name: list(row(name, found)) for name in OPERATIONS}
    for name, cells in table.items():
        shown = ("–" if cell is None else "=" if cell == 0 else f"{cell:.2g}" for cell in cells)
        print(f"| {name} | " + " | ".join(shown) + " |")
    if asked.json is not None:
        asked.json.write_text(json.dumps({"columns": names, "rows": table}, indent=1), encoding="utf-8")
    if not asked.examples:
        return 0
    print(f"\nA client's bits in any arrangement of a cohort, {asked.examples} random cases of each kind of model:\n")
    held = True
    for name, environment in settings.items():
        ending = tiles_under(environment, asked.examples)
        held = held and ending == "holds"
        print(f"{name:20} {ending}", flush=True)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
