"""One dotted key of a config of MMEngine, checked and set: :func:`set_key`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from typing import Any

from mmengine.config import Config
from mmengine.registry import MODELS

from vit3.errors import UserError
from vit3.openmmlab.datasets import EVALUATORS, LOADERS

# What a config says to the Runner; anything else at its top level is a variable of the file that nothing reads later.
_READ_BY_RUNNER = {
    *LOADERS, *EVALUATORS, "model", "train_cfg", "val_cfg", "test_cfg", "auto_scale_lr", "optim_wrapper",
    "param_scheduler", "default_hooks", "custom_hooks", "data_preprocessor", "load_from", "env_cfg", "log_processor",
    "log_level", "visualizer", "default_scope", "randomness", "model_wrapper_cfg", "find_unused_parameters", "sync_bn",
    "activation_checkpointing", "efficient_conv_bn_eval", "compile", "custom_imports", "tta_model", "tta_pipeline",
}  # fmt: skip

_TUPLES = ("scale", "img_scale", "crop_size", "ratio_range")  # mmcv refuses lists there


def set_key(config: Config, key: str, value: Any, added: bool, own: set[str]) -> None:
    """Set one dotted key of a config; numbers among its parts are places in a list."""
    parts = key.split(".")
    known = [k for k in config.keys() if k in _READ_BY_RUNNER]
    if parts[0] in config and parts[0] not in _READ_BY_RUNNER and not added:
        raise UserError(
            f"{key} is a variable of the config file, which nothing reads any more once the file is read; set the key "
            f"that it went into{_same_value(config, parts[0])}"
        )
    node: Any = config
    for depth, part in enumerate(parts):
        names = list(node.keys()) if hasattr(node, "keys") else [str(i) for i in range(_length(node))]
        if part not in names and not (hasattr(node, "keys") and (added or parts[0] == "model" and _takes(node, part))):
            if not depth:
                names = sorted([*known, *own])
            raise UserError(f"{key} is no key of this config; {_hint(config, parts, depth, names)}")
        if part not in names:
            break
        node = node[part] if hasattr(node, "keys") else node[int(part)]
    new = part not in names
    old = node if depth == len(parts) - 1 and not (added or new) else None
    if isinstance(value, str) and isinstance(old, int | float):  # numbers and switches; they may become null or a list
        kind = "true or false" if isinstance(old, bool) else "a number"
        raise UserError(f"{key}={value} is not allowed; it must be {kind}, such as {str(old).lower()}")
    tree: Any = _with_tuples(value, parts[-1], node if depth == len(parts) - 1 and not new else None)
    for part in reversed(parts):
        tree = {part: tree}
    config.merge_from_dict(tree, allow_list_keys=True)


def _takes(node: Any, name: str) -> bool:
    """Whether what the ``type`` of a part of the model means has an argument of this name."""
    if not isinstance(node.get("type"), str):
        return False
    with MODELS.switch_scope_and_registry(None) as registry:
        kind = registry.get(node.type)
    return any(name in inspect.signature(k.__init__).parameters for k in getattr(kind, "__mro__", ())[:-1])


def _with_tuples(value: Any, key: str, old: Any = None) -> Any:
    """Lists, all that YAML has, as the tuples that transforms ask for: where one was before, and under some names."""
    if isinstance(value, dict):
        return {k: _with_tuples(v, k) for k, v in value.items()}
    if not isinstance(value, list):
        return value
    items = [_with_tuples(item, "scale" if key == "scales" else "") for item in value]
    pair = key in _TUPLES and all(isinstance(item, int | float) for item in items)
    return tuple(items) if pair or isinstance(old, tuple) else items


def _length(node: Any) -> int:
    return len(node) if isinstance(node, list | tuple) else 0


def _hint(config: Config, parts: list[str], depth: int, names: list[str]) -> str:
    """What could have been meant by the part of a key that is not there."""
    above = ".".join(parts[:depth])
    near = difflib.get_close_matches(parts[depth], names, n=1)
    if near:
        return f"did you mean {'.'.join([*parts[:depth], near[0], *parts[depth + 1 :]])}?"
    leaf = parts[-1]
    same = [".".join(path) for path in _paths(config) if path[-1] == leaf and path[0] in _READ_BY_RUNNER]
    if 0 < len(same) <= 4:
        return f"did you mean {' or '.join(same)}?"
    new = f"+{'.'.join(parts)}=VALUE adds it"
    if not names:
        return f"{above} is a single value"
    return f"allowed{f' below {above}' if above else ''}: {', '.join(names[:20])}{', …' if names[20:] else ''}; {new}"


def _paths(node: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of a config as its parts."""
    items = node.items() if hasattr(node, "items") else enumerate(node) if isinstance(node, list | tuple) else ()
    for name, below in items:
        path = (*above, str(name))
        yield path
        yield from _paths(below, path)


def _same_value(config: Config, name: str) -> str:
    """Keys of the config called as a variable of its file, for a hint."""
    same = [".".join(p) for p in _paths(config) if p[-1] == name and p[0] in _READ_BY_RUNNER]
    return f", such as {same[0]}" if same else ""
