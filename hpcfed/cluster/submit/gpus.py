"""The number of GPUs that options of sbatch request, and the number of ranks that follows from it."""

from __future__ import annotations

from collections.abc import Mapping

Options = Mapping[str, str | int | None]


def asks_for_gpus(options: Options) -> bool:
    """Return whether any option requests GPUs, with or without a number."""
    return any(key.startswith(("gpu", "gres")) for key in options)


def gpus_of_node(options: Options, nodes: int) -> int:
    """Return the number of GPUs per node; 0 if ``gpus-per-node``, ``gres`` and ``gpus`` request none.

    Args:
        options: options of sbatch.
        nodes: the job's number of nodes, used if `options` has no ``nodes``.
    """
    typed = str(options.get("nodes", ""))
    nodes = max(1, int(typed)) if typed.isdecimal() else nodes
    in_gres = ",".join(part for part in str(options.get("gres", "")).split(",") if part.partition(":")[0] == "gpu")
    return _gpus(options.get("gpus-per-node")) or _gpus(in_gres) or _gpus(options.get("gpus")) // nodes


def ranks_of_gpus(options: Options, nodes: int) -> int:
    """Return the number of ranks per node: GPUs divided by ``gpus-per-task`` (default 1); 0 if `gpus_of_node` is 0."""
    return gpus_of_node(options, nodes) // (_gpus(options.get("gpus-per-task")) or 1)


def _gpus(option: str | int | None) -> int:
    """Return the number of GPUs in an option's value: ``4``, ``a100:4``, ``a100:2,h100:2``; ``gpu`` is 1, None is 0."""
    numbers = (part.rpartition(":")[2] for part in str(option or "").split(",") if part)
    return sum(int(number) if number.isdecimal() else 1 for number in numbers)
