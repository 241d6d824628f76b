"""The GPUs that options of sbatch ask for, and the ranks that follow from them."""

from __future__ import annotations

from collections.abc import Mapping

Options = Mapping[str, str | int | None]


def asks_for_gpus(options: Options) -> bool:
    """Return whether an option names GPUs, however many."""
    return any(key.startswith(("gpu", "gres")) for key in options)


def gpus_of_node(options: Options, nodes: int) -> int:
    """Return the GPUs of each node; 0 if no option counts them.

    Args:
        options: of sbatch.
        nodes: of the job, if no option says it.
    """
    typed = str(options.get("nodes", ""))
    nodes = max(1, int(typed)) if typed.isdecimal() else nodes
    in_gres = ",".join(part for part in str(options.get("gres", "")).split(",") if part.partition(":")[0] == "gpu")
    return _gpus(options.get("gpus-per-node")) or _gpus(in_gres) or _gpus(options.get("gpus")) // nodes


def ranks_of_gpus(options: Options, nodes: int) -> int:
    """Return the ranks of a node: one for each GPU, or for ``gpus-per-task`` of them; 0 if no option counts GPUs."""
    return gpus_of_node(options, nodes) // (_gpus(options.get("gpus-per-task")) or 1)


def _gpus(option: str | int | None) -> int:
    """Return the number of GPUs in an option of sbatch, such as 4, ``a100:4``, ``a100:2,h100:2`` or ``gpu`` for one."""
    numbers = (part.rpartition(":")[2] for part in str(option or "").split(",") if part)
    return sum(int(number) if number.isdecimal() else 1 for number in numbers)
