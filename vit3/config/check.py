"""From a composed configuration to a typed one: every key known, every mistake one sentence."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vit3.config.limits import CHOICES, LENGTHS, RANGES
from vit3.errors import UserError


def typed(cfg: DictConfig, schema: type) -> Any:
    """Turn a composed configuration into an instance of ``schema`` with every key known and every type right.

    Raises:
        UserError: unknown or missing key, wrong type, or a value outside of what is allowed.
    """
    plain = OmegaConf.to_container(cfg, resolve=False)
    _check_keys(plain, schema, prefix="")
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        key = missing[0]
        raise UserError(f"{key} has no value yet; set it on the command line: {key}=VALUE")
    try:
        run = OmegaConf.to_object(OmegaConf.merge(_structured(schema), cfg))
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        if "is not a ListConfig" in reason:
            reason = "the value must be a list, in brackets: [1,2]"
        raise UserError(f"{getattr(error, 'full_key', None) or 'config'}: {reason}") from error
    except ValueError as error:  # what a frozen part says of its values
        raise UserError(str(error)) from error
    free = {name for name, kind in _types(schema).items() if kind is Any}  # checked where they are used
    ranges = {key: bounds for key, bounds in RANGES.items() if key not in free}
    check_values(run, CHOICES, ranges, LENGTHS)
    return run


def _structured(schema: type) -> DictConfig:
    """``schema`` as OmegaConf takes it; its frozen parts, which OmegaConf would lock, can be filled."""
    structured = OmegaConf.structured(schema)
    for field in dataclasses.fields(schema):
        kind = _dataclass_of(field, schema)
        if kind and kind.__dataclass_params__.frozen:
            part = OmegaConf.structured(kind)
            OmegaConf.set_readonly(part, False)
            structured[field.name] = part
    return structured


def nearest(name: str, allowed) -> str:
    """``did you mean X?`` for the closest of ``allowed``, or those on the level of ``name`` where none is close."""
    group, _, leaf = name.rpartition(".")
    elsewhere = sorted(other for other in allowed if group and other.rpartition(".")[2] == leaf)
    near = elsewhere or difflib.get_close_matches(name, allowed, n=1)
    if near:
        return f"did you mean {' or '.join(near)}?"
    level = sorted(other for other in allowed if other.rpartition(".")[0] == group)
    level = level or sorted(other for other in allowed if "." not in other)
    return f"allowed: {', '.join(level[:20])}{', …' if level[20:] else ''}"


def known_keys(schema: type, prefix: str = "") -> list[str]:
    """All keys of a schema, dotted, groups included."""
    keys = []
    for field in dataclasses.fields(schema):
        key = prefix + field.name
        keys.append(key)
        kind = _dataclass_of(field, schema)
        if kind:
            keys += known_keys(kind, key + ".")
    return keys


def _dataclass_of(field, schema):
    """The part that a key stands for; also where null may stand in its place."""
    kind = _types(schema)[field.name]
    parts = get_args(kind) if get_origin(kind) is Union else (kind,)
    kinds = [part for part in parts if dataclasses.is_dataclass(part)]
    return kinds[0] if kinds else None


@functools.cache
def _types(schema: type) -> dict[str, Any]:
    """Types of the fields, their names looked up where the schema (or what it inherits from) is defined."""
    return get_type_hints(schema)


def _check_keys(plain: dict, schema: type, prefix: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(schema)}
    for name, value in plain.items():
        if name not in fields:
            raise UserError(f"{prefix}{name} is no key of this program; {nearest(name, fields)}")
        kind = _dataclass_of(fields[name], schema)
        if kind and isinstance(value, dict):
            _check_keys(value, kind, f"{prefix}{name}.")
    for name in fields.keys() - plain.keys():
        raise UserError(f"{prefix}{name} is missing from the configuration")


def check_values(run, choices: Mapping[str, tuple], ranges: Mapping[str, tuple], lengths: Mapping[str, int]) -> None:
    """Raise a UserError where a value is not what its dotted key allows; keys that ``run`` lacks are passed over.

    Args:
        choices: the values allowed. ranges: lowest and highest, both included, None = no bound.
        lengths: how many numbers a list must have, all positive.
    """
    for key, allowed in choices.items():
        value = _look_up(run, key)
        if value is not _ABSENT and value not in allowed:
            names = ", ".join("null" if choice is None else str(choice) for choice in allowed)
            raise UserError(f"{key}={value} is not allowed; use one of: {names}")
    for key, (low, high) in ranges.items():
        value = _look_up(run, key)
        if value is _ABSENT or value is None:
            continue
        if not (value >= (low if low is not None else value)) or (high is not None and not value <= high):  # NaN too
            bounds = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
            raise UserError(f"{key}={value} is not allowed; it must be {bounds}")

    for key, length in lengths.items():
        value = _look_up(run, key)
        if value is _ABSENT or value is None:
            continue
        if len(value) != length or not all(v > 0 for v in value):
            raise UserError(f"{key}={value} is not allowed; it must be a list of {length} positive numbers")


_ABSENT = object()


def _look_up(run, key: str):
    for name in key.split("."):
        run = getattr(run, name, _ABSENT)
        if run is _ABSENT:
            return _ABSENT
    return run
