"""Floors of a round: the arithmetic of `jobs/bench/bare.py` written by hand for one workload at a time.

Usage: floors.py MODEL FOLDER ROUNDS WARM-UP-ROUNDS DEVICE (client-graph | vmap | round-graph)

client-graph: a client's epoch captured as one CUDA graph, replayed for each client of the cohort; vmap: the cohort in
lockstep by `torch.func`; round-graph: that captured as one graph for the whole round. On a CPU, which has no graphs,
the same work runs without. Everything but the arithmetic is left out: no sums over ranks, no record, no client states.
Prints the times as bare.py does, and uses nothing of hpcfed.
"""

import copy
from collections.abc import Callable

import torch
from bare import DECAYS, EVALUATE_EVERY, LR, MODELS, WEIGHT_DECAY, Data, device_of, evaluate, parsed, parser_of, timed
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

WARM_UP = 2
"""Runs of some work before its capture, as CUDA wants them."""


def captured(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return a function that replays `work` as one graph; on a CPU `work` itself."""
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


@torch.no_grad()
def descend(parameters: list[Tensor], gradients: list[Tensor], decay: float) -> None:
    """Take a step of SGD in place."""
    if decay:
        torch._foreach_add_(gradients, parameters, alpha=decay)
    torch._foreach_add_(parameters, gradients, alpha=-LR)


def by_client(data: Data, server: nn.Module, batch_size: int, decay: float) -> Callable[[list[int]], None]:
    """Return a round that replays one graph, a client's epoch, for each client; w is `server`'s parameters."""
    x, y, n = data.x, data.y, data.bounds[1]
    w = [parameter.detach() for parameter in server.parameters()]
    model = copy.deepcopy(server)
    own = list(model.parameters())
    sums = [torch.zeros_like(each) for each in w]
    order = torch.arange(n, device=x.device)

    def epoch() -> None:
        with torch.no_grad():
            torch._foreach_copy_(own, w)
        for start in range(0, n, batch_size):
            batch = order[start : start + batch_size]
            descend(own, list(torch.autograd.grad(cross_entropy(model(x[batch]), y[batch]), own)), decay)
        with torch.no_grad():
            torch._foreach_add_(sums, own)

    replay = captured(epoch, x.device)

    def round_of(cohort: list[int]) -> None:
        torch._foreach_zero_(sums)
        for client in cohort:
            order.copy_(torch.randperm(n, device=x.device).add_(data.bounds[client]))
            replay()
        torch._foreach_copy_(w, torch._foreach_div(sums, len(cohort)))

    return round_of


def in_lockstep(
    data: Data, server: nn.Module, batch_size: int, decay: float, *, graphed: bool
) -> Callable[[list[int]], None]:
    """Return a round that trains the whole cohort at once by `torch.func`; w is `server`'s parameters."""
    x, y, n, count = data.x, data.y, data.bounds[1], len(data.cohorts[0])
    model, names = copy.deepcopy(server), [name for name, _ in server.named_parameters()]
    w = [parameter.detach() for parameter in server.parameters()]
    stacks = [each.expand(count, *each.shape).contiguous() for each in w]
    orders = torch.arange(n, device=x.device).repeat(count, 1)

    def loss(parameters: tuple[Tensor, ...], inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, dict(zip(names, parameters, strict=True)), (inputs,)), targets)

    gradients = vmap(grad(loss), randomness="different")

    def work() -> None:
        torch._foreach_copy_(stacks, [each.expand_as(stack) for each, stack in zip(w, stacks, strict=True)])
        for start in range(0, n, batch_size):
            batch = orders[:, start : start + batch_size]
            descend(stacks, list(gradients(tuple(stacks), x[batch], y[batch])), decay)
        torch._foreach_copy_(w, [stack.mean(0) for stack in stacks])

    before = [each.clone() for each in w]
    replay = captured(work, x.device) if graphed else work
    torch._foreach_copy_(w, before)  # which capturing has trained
    starts = torch.tensor(data.bounds[:-1])

    def round_of(cohort: list[int]) -> None:
        drawn = torch.rand(count, n).argsort(1) + starts[cohort].unsqueeze(1)
        orders.copy_(drawn.to(x.device, non_blocking=True))
        replay()

    return round_of


def floor(kind: str, data: Data, server: nn.Module, batch_size: int, decay: float) -> Callable[[list[int]], None]:
    """Return a round of one kind."""
    if kind == "client-graph":
        return by_client(data, server, batch_size, decay)
    return in_lockstep(data, server, batch_size, decay, graphed=kind == "round-graph")


def main() -> None:
    """Run a floor and print the milliseconds of a round."""
    parser = parser_of(__doc__)
    parser.add_argument("kind", choices=("client-graph", "vmap", "round-graph"))
    asked = parsed(parser)
    build, batch_size = MODELS[asked.model]
    place = device_of(asked.device)
    data = Data(asked.folder, place)
    torch.manual_seed(0)
    server = build().to(place)
    train = floor(asked.kind, data, server, batch_size, DECAYS.get(asked.model, WEIGHT_DECAY))

    def round_of(number: int) -> None:
        train(data.cohorts[number])
        if data.tests and (number + 1) % EVALUATE_EVERY == 0:
            evaluate(server, data.tests)

    timed(round_of, asked.rounds, asked.warm_up, place, mean=bool(data.tests))


if __name__ == "__main__":
    main()
