"""Recipes with objects of Python in the places of names: functions, classes, modules, losses, methods, observers.

model      a module (the initial model itself), a class, or a function that returns a module
loss       a loss of `torch.nn`, a function (output, target) → one loss per sample, or one that returns such
algorithm  a `hpcfed.types.Method`, or a function that returns one
local      a mapping with ``step``, a function
evaluate   a mapping with ``metrics``, a mapping of names to functions, or to mappings with ``sum`` or ``whole``
updates    a `hpcfed.UpdatePart`, its class, or a list with such; ``means`` and ``down`` likewise
observers  objects with ``start``, ``round`` or ``end``, or a list of them
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hpcfed.config.user_code.capture import importable
from hpcfed.config.user_code.given import Collector, GivenCode
from hpcfed.errors import InputError, shown

SECTIONS = ("model", "algorithm", "loss")
LISTS = ("updates", "means", "down")
OF_ALL = {"CrossEntropyLoss": ("label_smoothing",), "BCEWithLogitsLoss": (), "MSELoss": (), "L1Loss": (),
          "SmoothL1Loss": ("beta",), "HuberLoss": ("delta",)}  # fmt: skip
"""Losses of torch → their parameters; hpcfed averages them over a sample's outputs, then over samples, as torch."""
OF_TORCH = "hpcfed.models.losses:of_torch"


def named_objects(content: Mapping[str, Any]) -> tuple[dict[str, Any], GivenCode]:
    """Return a recipe with names in the places of objects, and the code that has these names.

    Raises:
        InputError: an object that stands for nothing there.
    """
    collector = Collector()
    found = {key: _named(key, value, collector) for key, value in content.items()}
    return found, collector.result()


def _named(key: str, value: Any, collector: Collector) -> Any:
    if key == "data":  # samples are written by rank 0, which alone may have them
        return value
    if key in SECTIONS:
        return _section(key, _plain(value), collector)
    if key == "local" and isinstance(value, Mapping) and _is_code(value.get("step")):
        return {**_plain(value), "step": _reference(value["step"], "step", collector)}
    if key == "evaluate" and isinstance(value, Mapping) and "metrics" in value:
        return {**_plain(value), "metrics": _metrics(value["metrics"], collector)}
    if key in LISTS:
        entries = value if isinstance(value, list | tuple) else [value]
        return None if value is None else [_part(entry, key, collector) for entry in entries]
    if key == "observers":
        entries = value if isinstance(value, list | tuple) else [value]
        return [_observer(entry, collector) for entry in entries]
    return _plain(value)


def _plain(value: Any) -> Any:
    """Return numbers of NumPy and torch as Python's, in mappings and lists, too."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    return value.item() if torch is not None and isinstance(value, torch.Tensor) and value.ndim == 0 else value


def _is_code(value: Any) -> bool:
    return callable(value) or (value is not None and _is_object(value))


def _is_object(value: Any) -> bool:
    """Whether a value is none that a recipe's text could have."""
    from os import PathLike

    return not isinstance(value, str | int | float | Mapping | list | tuple | PathLike | type(None))


def _section(key: str, value: Any, collector: Collector) -> Any:
    if not isinstance(value, Mapping):
        return _of_object(key, value, collector) if _is_object(value) else value
    factory, args = value.get("factory"), value.get("args", {})
    if not callable(factory):
        return value
    if isinstance(args, Mapping) and any(_is_object(each) for each in args.values()):
        factory = functools.partial(factory, **args)
        value = {name: entry for name, entry in value.items() if name != "args"}
    return {**value, "factory": _reference(factory, key, collector)}


def _part(value: Any, key: str, collector: Collector) -> Any:
    """Return the section of a part of a list, which may be an object, its class, or a mapping with such a factory."""
    if isinstance(value, Mapping):
        return _section(key, _plain(value), collector)
    if inspect.isclass(value):
        return {"factory": _reference(value, key, collector)}
    return {"factory": collector.maker(value, key)} if _is_object(value) else value


def _of_object(key: str, value: Any, collector: Collector) -> dict[str, Any]:
    """Return the section of a model, a loss or a method that is an object."""
    if key == "loss":
        return _loss(value, collector)
    torch, types = sys.modules.get("torch"), sys.modules.get("hpcfed.types")
    if key == "model" and torch is not None and isinstance(value, torch.nn.Module):
        return {"factory": collector.maker(value, "model")}
    if key == "algorithm" and types is not None and isinstance(value, types.Method):
        return {"factory": collector.maker(value, "algorithm")}
    what = {"model": "a torch.nn.Module", "algorithm": "a hpcfed.types.Method"}[key]
    if not callable(value):
        raise InputError(key, expected=f"{what}, a function that returns one, or a name", got=_kind(value))
    return {"factory": _reference(value, key, collector)}


def _reference(value: Any, key: str, collector: Collector) -> str:
    """Return the name of a function or class: of its module where that is a file, else of `GIVEN`."""
    found = importable(value) if inspect.isclass(value) or inspect.isroutine(value) else None
    if found is not None and found[1].isidentifier():
        collector.note(found[0])
        return ":".join(found)
    name = getattr(value, "__name__", key)
    return collector.name(value, name if name.isidentifier() else key)


def _loss(value: Any, collector: Collector) -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is not None and value is torch.nn.functional.cross_entropy:
        return {"name": "cross-entropy"}
    if torch is not None and isinstance(value, torch.nn.Module):
        return _loss_of_torch(value) or {"factory": collector.maker(value, "loss")}
    if not callable(value):
        expected = "a loss of torch.nn, a function (output, target), or a name"
        raise InputError("loss", expected=expected, got=_kind(value))
    takes_nothing = inspect.isclass(value) or _can_be_called(value)
    return {"factory": _reference(value, "loss", collector) if takes_nothing else collector.maker(value, "loss")}


def _can_be_called(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a function takes these arguments; it does where that is not known."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _loss_of_torch(loss: Any) -> dict[str, Any] | None:
    """Return the section of one of torch's losses; None for a module of the user's.

    Raises:
        InputError: it weighs classes, or is not a loss per sample.
    """
    name = type(loss).__name__
    if not type(loss).__module__.startswith("torch."):
        return None
    reduction = {"none": "mean"}.get(loss.reduction, loss.reduction)
    if name not in OF_ALL:
        remedy = f"give a function (output, target) → one loss per sample, or one of {', '.join(OF_ALL)}"
        raise InputError(f"loss: torch.nn.{name}", remedy=remedy)
    weights = [key for key in ("weight", "pos_weight") if getattr(loss, key, None) is not None]
    if weights or getattr(loss, "ignore_index", -100) != -100:
        what = f"loss: torch.nn.{name} with {weights[0] if weights else 'ignore_index'}"
        remedy = "loss={'weights': [1, 3]}, of classes, divides by its samples"
        raise InputError(f"{what}, whose mean divides by what a minibatch holds", remedy=remedy)
    args = {key: getattr(loss, key) for key in OF_ALL[name]}
    if name == "CrossEntropyLoss" and not args["label_smoothing"]:
        return {"name": "cross-entropy", "reduction": reduction}
    return {"factory": OF_TORCH, "args": {"name": name, "reduction": reduction, **args}, "reduction": reduction}


def _metrics(metrics: Any, collector: Collector) -> Any:
    if isinstance(metrics, list | tuple):
        return [_metrics(each, collector) for each in metrics]
    if not isinstance(metrics, Mapping):
        return _metric(metrics, collector)
    return {name: _a_metric(str(name), metric, collector) for name, metric in metrics.items()}


def _metric(metric: Any, collector: Collector) -> Any:
    """Return a metric without a name: a function has its own."""
    if not callable(metric):
        return metric
    name = getattr(metric, "__name__", "")
    if not name.isidentifier():
        raise InputError("evaluate.metrics", expected="a name for each: {'top3': function}", got=_kind(metric))
    return {name: _reference(metric, name, collector)}


def _a_metric(name: str, metric: Any, collector: Collector) -> Any:
    key = name if name.isidentifier() else "metric"
    if isinstance(metric, Mapping):
        kinds = ("sum", "whole")
        return {
            kind: _reference(each, key, collector) if kind in kinds and callable(each) else each
            for kind, each in metric.items()
        }
    return _reference(metric, key, collector) if callable(metric) else metric


def _observer(value: Any, collector: Collector) -> Any:
    if isinstance(value, Mapping) and _is_code(value.get("factory")):
        return {"factory": collector.observer(value["factory"](**value.get("args", {})))}
    if inspect.isclass(value):
        return {"factory": collector.observer(value())}
    return {"factory": collector.observer(value)} if _is_object(value) else value


def _kind(value: Any) -> str:
    return f"{shown(value)}, of type {type(value).__name__}"
