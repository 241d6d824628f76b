"""A module whose parameters and gradients are views of two flat vectors.

The whole round works on vectors (d,): one copy loads a model, one fused operation steps it, one buffer is reduced.
Every parameter tensor starts on a 64-byte boundary: matrix products may round differently otherwise. The vector's
length is a multiple of 128 bytes: elementwise kernels may round a partial SIMD tail differently. The gaps stay 0 in the
model, in its gradient and so in every Δ.

Private parameters lie behind the shared ones in the same memory, so that a client's optimizer steps both at once, while
all else knows the shared vector alone:

    [ shared: vector (d,) | private (p,) ]
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hpcfed.config.parameters import Parameters
from hpcfed.errors import InputError
from hpcfed.io.text import Malformed, refuse_special
from hpcfed.models.attributes import ModuleAttributes
from hpcfed.models.bindings import Bindings
from hpcfed.models.buffers import BufferGroup
from hpcfed.models.roles import BufferRole, roles_of, tracking
from hpcfed.types import State

ALIGNMENT, END = 64, 128  # bytes
PRIVATE_PREFIX = "private."
"""Beginning of the names of a client's private tensors in its state; no method's names begin so."""
PARAMETERS = f"{PRIVATE_PREFIX}parameters"

Places = dict[str, tuple[int, torch.Size]]
"""Each parameter's first entry in a vector, and its shape."""


@dataclass(frozen=True)
class Findings:
    """What the first calls of a module showed.

    Attributes:
        has_known_outputs: whether its outputs have a shape that the task's accuracy and the built-in metrics know.
        gives_probabilities: whether its outputs are those of a softmax.
        unused: trainable parameters that its outputs do not depend on.
        unsteady: what its outputs in evaluation depend on beside a sample: "" or a reason.
        own_seed: the seed that the user's code sets torch's generator to while it builds the module; None for none.
    """

    has_known_outputs: bool = True
    gives_probabilities: bool = False
    unused: Sequence[str] = ()
    unsteady: str = ""
    own_seed: int | None = None


class FlatModel:
    """A module laid out over one vector of parameters and one of gradients.

    Attributes:
        module: the module; its trainable parameters are views of `trained`, their ``grad`` views of `trained_grad`.
        vector: all shared parameters, (d,), gaps included.
        grad: their gradients, (d,).
        trained, trained_grad: shared and private ones, (d + p,); `vector` and `grad` themselves if p = 0.
        private, private_grad: the private ones, (p,); None if p = 0.
        gaps: the entries of `vector` that no parameter has, int64.
        num_parameters: shared parameters, gaps not counted.
        own: what a client begins with beside the shared parameters: private parameters and buffers. Empty without.
        averaged: the averaged buffers after the last round, which the simulation sets; empty without.
        averaging: layers whose running mean and variance are among them.
        is_plain: whether `vector` is all that training changes.
        attributes, bindings: of a user's module, what its calls may change; None where they are not looked at.
        rounded: buffers whose values the run's dtype rounds.
        findings: of the assembly's first calls.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, device: torch.device, parameters: Parameters | None = None
    ):
        self._roles = roles = roles_of(parameters or Parameters(), module)
        for name, parameter in module.named_parameters():
            if name in roles.frozen:
                parameter.requires_grad_(False)
        self.rounded = [name for name, buffer in module.named_buffers() if _rounds(buffer, dtype)]
        self.module = _converted(module, dtype, device)
        for name in roles.buffers:
            if self.module.get_buffer(name).dtype == torch.complex128:
                remedy = "keep its real and imaginary parts as two buffers, or leave it constant, without a role"
                raise InputError(
                    f"parameters: buffer {name!r} in complex128 cannot be in a model's file", remedy=remedy
                )
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        shared = {name: p for name, p in trainable.items() if name not in roles.private}
        private = {name: p for name, p in trainable.items() if name in roles.private}
        per_line = ALIGNMENT // dtype.itemsize
        self._places, size = _laid_out(shared, per_line)
        self._private_places, private_size = _laid_out(private, per_line)
        self.num_parameters = sum(parameter.numel() for parameter in shared.values())
        self.gaps = _gaps(self._places, size).to(device)
        self.trained = torch.zeros(size + private_size, dtype=dtype, device=device)
        self.trained_grad = torch.zeros_like(self.trained)
        self.vector, self.grad = self.trained, self.trained_grad
        self.private: Tensor | None = None
        self.private_grad: Tensor | None = None
        if private:
            self.vector, self.private = self.trained.split([size, private_size])
            self.grad, self.private_grad = self.trained_grad.split([size, private_size])
        named_views, named_grads = (self.trained_views(tensor) for tensor in (self.trained, self.trained_grad))
        for name, parameter in trainable.items():
            named_views[name].copy_(parameter.detach())
            parameter.data = named_views[name]
            parameter.grad = named_grads[name]
        self._groups = {role: BufferGroup(module, roles.buffers_of(role)) for role in ("averaged", "private", "fixed")}
        self._in_eval = self._tracking("fixed")
        self.averaging: list[Any] = [part for part in self._tracking("averaged") if hasattr(part, "running_var")]
        self._remember()
        self.attributes: ModuleAttributes | None = None
        self.bindings: Bindings | None = None
        self._threads = torch.get_num_threads()
        self._is_measured = False
        self.findings = Findings()
        if self._in_eval:
            self.train()

    def _tracking(self, role: BufferRole) -> list[nn.Module]:
        """Return the layers with running statistics that all have this role."""
        names = {*self._roles.buffers_of(role)}
        return [part for _, part, buffers in tracking(self.module) if buffers and names >= {*buffers}]

    def _remember(self) -> None:
        """Take the module's present values for the initial ones."""
        self._constant = {
            name: buffer.clone() for name, buffer in self.module.named_buffers() if name not in self._roles.buffers
        }
        persistent = self.module.state_dict().keys()
        self._caches = {name: buffer for name, buffer in self._constant.items() if name not in persistent}
        self.own: State = self.private_state()
        self.averaged: State = self._groups["averaged"].read()
        self._fixed = self._groups["fixed"].read()
        self.is_plain = not (self.own or self.averaged or self._fixed)

    def load(self, w: Tensor, own: State | None = None) -> None:
        """Set the shared parameters to `w`, (d,), and all else to what a client has that keeps `own`; default: `own`
        of this model, the initial values.
        """
        with self._bound():
            self.vector.copy_(w)
            if self.is_plain:
                return
            own = own or self.own
            if self.private is not None:
                self.private.copy_(own[PARAMETERS])
            self.set_buffers(own, self.averaged)

    @contextmanager
    def _bound(self) -> Iterator[None]:
        """Set values with all parameters bound to them, which then are those of an evaluation."""
        if self.bindings is None:
            yield
            return
        with self.bindings.in_training_mode():
            self.bindings.rebind()
            yield
            if self._is_measured:
                self.trained_grad.copy_(self.trained)

    def watch(self) -> None:
        """Look at what calls of the module change beside their outputs, since it is the user's."""
        self.attributes = ModuleAttributes(self.module)
        self.bindings = Bindings(self.module, self.trained_views(self.trained), self.trained_views(self.trained_grad))
        kept = self.trained.clone()
        self.bindings.keep_merged()
        self.trained.copy_(kept)
        self.train()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Set the module to evaluation, and back to training.

        What a user's module changes in its parameters meanwhile, `forget` undoes, so that no unit of an evaluation
        depends on the one before. The values are kept where gradients lie, which evaluations do not need.
        """
        if self.bindings is not None:
            self.trained_grad.copy_(self.trained)
            self._is_measured = True
        self.module.eval()
        try:
            yield
        finally:
            self._is_measured = False
            self.train()
            if self.bindings is not None:
                self.bindings.rebind()

    def set_buffers(self, own: State, averaged: State) -> None:
        """Set the buffers to a client's own, to averaged ones, and to the fixed ones."""
        self._groups["private"].write({name.removeprefix(PRIVATE_PREFIX): tensor for name, tensor in own.items()})
        self._groups["averaged"].write(averaged)
        self._groups["fixed"].write(self._fixed)

    def forget(self) -> None:
        """Set tensors that a user's module keeps beside parameters and buffers to the initial ones; in an evaluation,
        parameters to the values that were loaded.
        """
        if self.attributes is None or self.bindings is None:
            return
        with self.bindings.in_training_mode():
            self.attributes.reset()
            self._reset_caches()
            if self._is_measured:
                self.bindings.rebind()
                self.trained.copy_(self.trained_grad)

    def seed(self, number: int) -> None:
        """Set the random generators that a user's module keeps to seeds that follow from a number, until `forget`."""
        if self.attributes is not None:
            self.attributes.seed(number)

    def _reset_caches(self) -> None:
        """Set buffers that are no part of the module's state (``persistent=False``) to the initial ones."""
        for name, first in self._caches.items():
            path, _, own = name.rpartition(".")
            buffers = self.module.get_submodule(path)._buffers
            now = buffers[own]
            if now is None or not _equal(now, first):
                buffers[own] = first.clone()

    @property
    def shows_gradients(self) -> bool:
        """Whether code of the user's sees each parameter's gradient as soon as it is added up."""
        return self.bindings is not None and self.bindings.are_hooked

    def keep_values(self) -> None:
        """After a forward pass, keep the values of parameters that the module has given other memory.

        Raises:
            InputError: a parameter is another object, or has another shape or dtype.
        """
        if self.bindings is not None:
            self.bindings.keep_values()

    def adopt(self) -> None:
        """After a gradient, keep the values of parameters that the module has given other memory.

        Raises:
            InputError: a parameter or a gradient is another object, or has another shape or dtype.
        """
        if self.bindings is not None:
            self.bindings.adopt()

    def news(self) -> Iterator[str]:
        """Yield, once, a line on each attribute of the module that passes from client to client."""
        if self.attributes is not None:
            yield from self.attributes.news()

    def private_state(self) -> State:
        """Return a copy of the private parameters and buffers, by the names that they have in a client's state."""
        parameters = {} if self.private is None else {PARAMETERS: self.private.clone()}
        buffers = self._groups["private"].read()
        return {**parameters, **{f"{PRIVATE_PREFIX}{name}": tensor for name, tensor in buffers.items()}}

    def averaged_buffers(self) -> State:
        """Return a copy of the module's averaged buffers as they are now."""
        return self._groups["averaged"].read()

    @contextmanager
    def with_averaged(self, averaged: State) -> Iterator[None]:
        """Load models with these averaged buffers in place of those after the last round."""
        before, self.averaged = self.averaged, averaged
        try:
            yield
        finally:
            self.averaged = before

    def train(self) -> None:
        """Set the module to training; layers whose running statistics are fixed use them as in evaluation."""
        self.module.train()
        for part in self._in_eval:
            part.eval()

    def check_buffers(self) -> None:
        """Refuse changes by training that would carry one client's data to the next.

        Raises:
            InputError: a buffer without a role, or a frozen parameter, has another value; or a parameter was replaced.
        """
        if self.bindings is not None:
            self.bindings.check()
        for name, buffer in self.module.named_buffers():
            if name in self._roles.buffers or name in self._caches:
                continue
            if name not in self._constant or not _equal(buffer, self._constant[name]):
                what = f"model: training changed the buffer {name!r}, which would carry one client's data to the next"
                remedy = "set parameters.buffers, compute it anew in each forward pass, or make it a parameter"
                raise InputError(what, remedy=remedy)

    def check_threads(self) -> None:
        """Refuse code of the user's that sets torch's threads: a loss, a local step, a metric or a method.

        Raises:
            InputError: torch has another number of threads than when the model was built.
        """
        if (threads := torch.get_num_threads()) != self._threads:
            what = f"code of yours sets torch's threads to {threads}, by which results differ"
            raise InputError(what, remedy="leave it to the recipe's threads")

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Return each parameter's view of a vector (d,), by name; of several vectors, (R, d), as views (R, …)."""
        return _views(vector, self._places)

    def private_views(self, private: Tensor) -> dict[str, Tensor]:
        """Return each private parameter's view of a vector (p,), by name."""
        return _views(private, self._private_places)

    def trained_views(self, trained: Tensor) -> dict[str, Tensor]:
        """Return the views of a vector (d + p,), or of several: the shared parameters', then the private ones'."""
        size = len(self.vector)
        shared, private = trained.split([size, trained.shape[-1] - size], -1)
        return self.views(shared) | self.private_views(private)

    def named(self, vector: Tensor, averaged: State | None = None) -> dict[str, Tensor]:
        """Return a host copy of all that is not private, by name: shared parameters from a vector (d,), frozen ones,
        and buffers that have a role; averaged ones from `averaged`, default: those after the last round.
        """
        frozen = {name: p.detach() for name, p in self.module.named_parameters() if not p.requires_grad}
        self.set_buffers(self.own, self.averaged if averaged is None else averaged)
        kept = {name: self.module.get_buffer(name) for name, role in self._roles.buffers.items() if role != "private"}
        return _on_host(frozen | self.views(vector.to(self.vector.dtype)) | kept)

    def named_update(self, vector: Tensor) -> dict[str, Tensor]:
        """Return a host copy of a vector (d,), such as Δ_i, by the names of the shared parameters."""
        return _on_host(self.views(vector.to(self.vector)))

    def named_private(self, own: State, personal: Tensor | None = None) -> dict[str, Tensor]:
        """Return a host copy of a client's private parameters and buffers by name, and the other parameters of its
        personal model, from a vector (d,), where it has one.
        """
        self.load(self.vector, own)
        parameters = {} if self.private is None else self.private_views(self.private)
        buffers = {name: self.module.get_buffer(name) for name in self._roles.buffers_of("private")}
        of_own_model = {} if personal is None else self.views(personal.to(self.vector))
        return _on_host(parameters | buffers | of_own_model)

    def load_file(self, path: Path) -> None:
        """Set the initial values from a safetensors file of the module's parameters, and of its buffers with a role.

        Private tensors, those that the module itself does not train, and constant buffers may be missing.

        Raises:
            InputError: unreadable file, a name missing or unknown, or a tensor of another shape.
        """
        self._load(_read_file(path, "model.init"), path)

    def load_private_file(self, path: Path, *, personal: bool | None = False) -> None:
        """Set the private tensors from a file of a run's ``private/``.

        Args:
            path: of the file.
            personal: whether it has all parameters, those of a client's personal model; None: if it does.

        Raises:
            InputError: as `load_file` does.
        """
        tensors = _read_file(path, "private parameters")
        whole = self.named_private(self.own, self.vector).keys()
        is_whole = tensors.keys() == whole if personal is None else personal
        wanted = whole if is_whole else self.named_private(self.own).keys()
        if tensors.keys() != wanted:
            expected, got = f"parameters {sorted(wanted)}", f"{sorted(tensors)}"
            raise InputError("private parameters", where=str(path), expected=expected, got=got)
        self._set(tensors, path)

    def _load(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        kept = [name for name, role in self._roles.buffers.items() if role != "private"]
        wanted, known = {*self._places, *self._roles.frozen, *kept}, self.module.state_dict().keys()
        if not wanted <= tensors.keys() <= known:
            expected, got = f"parameters {sorted(wanted)}", f"{sorted(tensors)}"
            raise InputError("model.init", where=str(path), expected=expected, got=got)
        self._set(tensors, path)

    def _set(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        for name, own in self.module.state_dict().items():
            if name not in tensors:
                continue
            if tensors[name].shape != own.shape:
                raise InputError(
                    f"model.init: parameter {name!r}",
                    where=str(path),
                    expected=f"shape {tuple(own.shape)}",
                    got=f"{tuple(tensors[name].shape)}",
                )
            if flaw := _unlike(tensors[name], own):
                what = f"model.init: parameter {name!r}"
                raise InputError(what, where=str(path), expected=f"numbers of {own.dtype}", got=flaw)
            own.copy_(tensors[name])
        self._remember()


def _converted(module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return the module in the run's dtype, as ``module.to`` does, but complex buffers in the complex dtype of its
    precision: a real one would drop their imaginary parts.

    Raises:
        InputError: a trainable parameter is complex, or a value is too large for the dtype.
    """
    complex_dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise InputError(
                f"model: parameter {name!r}",
                expected="real numbers",
                got=str(parameter.dtype),
                remedy="keep it as real ones, (…, 2), and call torch.view_as_complex in forward",
            )
    kept = {}
    for name, buffer in module.named_buffers():
        if buffer.is_complex():
            kept[name] = buffer.to(device=device, dtype=complex_dtype)
        elif buffer.is_floating_point() and buffer.dtype.itemsize > dtype.itemsize:
            _refuse_overflow(name, buffer, dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values to real", UserWarning)
        module = module.to(device=device, dtype=dtype)
    for name, buffer in kept.items():
        path, _, own = name.rpartition(".")
        module.get_submodule(path)._buffers[own] = buffer
    return module


def _rounds(buffer: Tensor, dtype: torch.dtype) -> bool:
    """Whether a floating-point buffer has values that the run's dtype has not."""
    if not buffer.is_floating_point() or buffer.dtype.itemsize <= dtype.itemsize:
        return False
    return not _equal(buffer, buffer.to(dtype).to(buffer.dtype))


def _refuse_overflow(name: str, buffer: Tensor, dtype: torch.dtype) -> None:
    if not torch.equal(buffer.isfinite(), buffer.to(dtype).isfinite()):
        largest = buffer[buffer.isfinite()].abs().max()
        raise InputError(
            f"model: buffer {name!r} does not fit dtype: {str(dtype).removeprefix('torch.')}",
            expected=f"numbers up to {torch.finfo(dtype).max:.3g}",
            got=f"{float(largest):.3g}",
            remedy="use dtype: float64, or a smaller number",
        )


def _unlike(tensor: Tensor, own: Tensor) -> str:
    """Return what a tensor of a file has that its place in the module cannot hold, "" for nothing."""
    kinds = [(one.is_complex(), one.is_floating_point(), one.dtype == torch.bool) for one in (tensor, own)]
    if kinds[0] != kinds[1] or "float4" in str(tensor.dtype):  # quantized, or of another model
        return str(tensor.dtype)
    is_wide = own.is_floating_point() and tensor.dtype.itemsize > own.dtype.itemsize
    if is_wide and not torch.equal(tensor.isfinite(), tensor.to(own.dtype).isfinite()):
        return f"{tensor.dtype} with numbers beyond it"
    return ""


def _equal(buffer: Tensor, other: Tensor) -> bool:
    """Whether two buffers are the same, nan in the same places included."""
    if (buffer.shape, buffer.dtype, buffer.layout) != (other.shape, other.dtype, other.layout):
        return False
    if buffer.layout != torch.strided:  # neither kind of sparse tensor knows torch.equal
        return bool(torch.equal(buffer.to_dense(), other.to_dense()))
    if torch.equal(buffer, other):
        return True
    if not (buffer.is_floating_point() or buffer.is_complex()):
        return False
    return torch.equal(buffer.isnan(), other.isnan()) and torch.equal(buffer.nan_to_num(), other.nan_to_num())


def _read_file(path: Path, what: str) -> dict[str, Tensor]:
    if path.is_dir():
        raise InputError(f"{what}: is a folder", where=str(path), remedy="name a safetensors file in it")
    try:
        refuse_special(path)
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, Malformed, SafetensorError) as error:
        remedy = "name a safetensors file with the module's parameters"
        raise InputError(f"{what} cannot be read", where=str(path), got=str(error), remedy=remedy) from None


def _laid_out(parameters: Mapping[str, Tensor], per_line: int) -> tuple[Places, int]:
    """Return the parameters' places in a vector, and its length."""
    places, end = {}, 0
    for name, parameter in parameters.items():
        places[name] = (end, parameter.shape)
        end += -(-parameter.numel() // per_line) * per_line
    return places, end + -end % (per_line * END // ALIGNMENT)


def _gaps(places: Places, size: int) -> Tensor:
    """Return the entries of a vector that no parameter has, int64."""
    unused = torch.ones(size, dtype=torch.bool)
    for start, shape in places.values():
        unused[start : start + shape.numel()] = False
    return unused.nonzero().flatten()


def _views(vector: Tensor, places: Places) -> dict[str, Tensor]:
    several = vector.shape[:-1]
    return {
        name: vector[..., start : start + shape.numel()].view((*several, *shape))
        for name, (start, shape) in places.items()
    }


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
