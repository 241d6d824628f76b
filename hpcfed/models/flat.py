"""A module whose parameters and gradients are views of two flat vectors.

The whole round works on vectors (d,): one copy loads a model, one fused operation steps it, one buffer is reduced.
Every parameter tensor starts on a 64-byte boundary: matrix products may round differently otherwise. The vector's
length is a multiple of 128 bytes: elementwise kernels may round a partial SIMD tail differently. The gaps stay 0 in the
model, in its gradient and so in every Δ.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hpcfed.errors import InputError

ALIGNMENT, END = 64, 128  # bytes


class FlatModel:
    """A module laid out over one vector of parameters and one of gradients.

    Attributes:
        module: the module; its trainable parameters are views of `vector`, their ``grad`` views of `grad`.
        vector: all trainable parameters, (d,), gaps included.
        grad: their gradients, (d,).
        num_parameters: trainable parameters, gaps not counted.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: torch.device):
        _refuse_running_statistics(module)
        self.module = module.to(device=device, dtype=dtype)
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        if not trainable:
            raise InputError("model", expected="at least one trainable parameter", got="none")
        per_line = ALIGNMENT // torch.empty((), dtype=dtype).element_size()
        self._places: dict[str, tuple[int, torch.Size]] = {}
        end = 0
        for name, parameter in trainable:
            self._places[name] = (end, parameter.shape)
            end += -(-parameter.numel() // per_line) * per_line
        end += -end % (per_line * END // ALIGNMENT)
        self.num_parameters = sum(parameter.numel() for _, parameter in trainable)
        self.vector = torch.zeros(end, dtype=dtype, device=device)
        self.grad = torch.zeros(end, dtype=dtype, device=device)
        named_views, named_grads = self.views(self.vector), self.views(self.grad)
        for name, parameter in trainable:
            named_views[name].copy_(parameter.detach())
            parameter.data = named_views[name]
            parameter.grad = named_grads[name]
        self._buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}

    def check_buffers(self) -> None:
        """Refuse a module whose buffers change in training: they would carry one client's data to the next.

        Raises:
            InputError: naming the buffer.
        """
        for name, buffer in self.module.named_buffers():
            if name not in self._buffers or not torch.equal(buffer, self._buffers[name]):
                what = f"model: training changed the buffer {name!r}, which would carry one client's data to the next"
                raise InputError(what, remedy="compute it anew in each forward pass, or make it a parameter")

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return each parameter's view of a vector (d,), by name; of several vectors, (R, d), as views (R, …)."""
        several = vector.shape[:-1]
        return {
            name: vector[..., start : start + shape.numel()].view(*several, *shape)
            for name, (start, shape) in self._places.items()
        }

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Return a host copy of every parameter by name: trainable ones from a vector (d,), frozen ones as they are."""
        frozen = {name: p.detach() for name, p in self.module.named_parameters() if not p.requires_grad}
        both = frozen | self.views(vector.to(self.vector.dtype))
        return {name: tensor.cpu().contiguous().clone() for name, tensor in both.items()}

    def load_file(self, path: Path) -> None:
        """Set the parameters from a safetensors file that names them all.

        Raises:
            InputError: unreadable file, a parameter missing or unknown, or of another shape.
        """
        try:
            with safe_open(path, framework="pt") as file:
                self._load({name: file.get_tensor(name) for name in file.keys()}, path)  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError) as error:
            raise InputError("model.init cannot be read", where=str(path), got=str(error)) from None

    def _load(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        views = self.views(self.vector)
        if set(tensors) != set(views):
            raise InputError(
                "model.init", where=str(path), expected=f"parameters {sorted(views)}", got=f"{sorted(tensors)}"
            )
        for name, view in views.items():
            if tensors[name].shape != view.shape:
                raise InputError(
                    f"model.init: parameter {name!r}",
                    where=str(path),
                    expected=f"shape {tuple(view.shape)}",
                    got=f"{tuple(tensors[name].shape)}",
                )
            view.copy_(tensors[name])


def _refuse_running_statistics(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            raise InputError(
                f"model: {name or 'the module'} ({type(part).__name__}) keeps running statistics",
                remedy="these have no meaning under averaging: use GroupNorm, or track_running_stats=False",
            )
