"""Ablation files: the rows and columns of one table as settings, and the command line that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from yaml import YAMLError

from vit3.arguments import MULTIRUN, check_arguments
from vit3.config import nearest
from vit3.errors import UserError

_KEYS = ("title", "source", "recipe", "seeds", "rows", "columns", "baseline")
_LINE_KEYS = ("title", "set", "published")
_PUBLISHED = ("top1", "params_m", "macs_g", "images_per_s", "note")


@dataclass(frozen=True)
class Line:
    """A row or a column.

    Attributes:
        title: how the table shows it. set: its overrides. published: ``top1`` in percent, ``params_m`` and ``macs_g``
            in 10^6 and 10^9, ``images_per_s``, and a ``note``, as far as the source has them.
    """

    title: str
    set: tuple[str, ...] = ()
    published: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ablation:
    """What an ablation file says.

    Attributes:
        name: of the file, or its path where it is not one of ours. title, source: what the table is and whose.
        recipe: the recipe of runs whose command names none. seeds: of each cell. rows, columns: by label.
        baseline: label of the row that differences refer to.
    """

    name: str
    title: str
    source: str
    recipe: str | None
    seeds: tuple[int, ...]
    rows: dict[str, Line]
    columns: dict[str, Line]
    baseline: str


def load_ablation(name: str, configs: Path) -> Ablation:
    """Read and check a file.

    Args:
        name: of a file in ``configs``/ablation, or the path of another one, which ends in ``.yaml``.

    Raises:
        UserError: no such file, or it says something that is not understood.
    """
    path = Path(name).absolute() if name.endswith(".yaml") else configs / "ablation" / f"{name}.yaml"
    if not path.is_file():
        names = [other.stem for other in (configs / "ablation").glob("*.yaml")]
        raise UserError(f"ablation={name}: no such file; {nearest(name, names)}")
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, ValueError) as error:
        raise UserError(f"{path} is no YAML file ({str(error).splitlines()[0]})") from error
    try:
        return _ablation(str(path) if name.endswith(".yaml") else name, content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _ablation(name: str, content: Any) -> Ablation:
    _check_keys(content, _KEYS, "", needed=("title", "source", "seeds", "rows", "baseline"))
    seeds = content["seeds"]
    if not (isinstance(seeds, list) and seeds and all(type(seed) is int and seed >= 0 for seed in seeds)):
        raise UserError(f"seeds: {seeds} must be a list of whole numbers, such as [0, 1]")
    rows, columns = (_lines(content.get(what) or {}, what) for what in ("rows", "columns"))
    if not rows:
        raise UserError("rows: there is none")
    if content["baseline"] not in rows:
        raise UserError(f"baseline: {content['baseline']} is no row; {nearest(str(content['baseline']), rows)}")
    return Ablation(
        name, content["title"], content["source"], content.get("recipe"), tuple(seeds), rows, columns,
        content["baseline"],
    )  # fmt: skip


def _check_keys(content: Any, allowed: Sequence[str], where: str, needed: Sequence[str] = ()) -> None:
    if not isinstance(content, dict):
        raise UserError(f"{where or 'file: '}must hold keys: {', '.join(allowed)}")
    for key in content:
        if key not in allowed:
            raise UserError(f"{where}{key} is no key of an ablation file; {nearest(str(key), allowed)}")
    for key in needed:
        if content.get(key) is None:
            raise UserError(f"{where}{key} is missing")


def _lines(content: Any, what: str) -> dict[str, Line]:
    if not isinstance(content, dict):
        raise UserError(f"{what} must be a mapping of labels to settings")
    lines = {}
    for label, line in content.items():
        _check_label(label, what)
        line = line or {}
        _check_keys(line, _LINE_KEYS, f"{what}.{label}.")
        published = line.get("published") or {}
        _check_keys(published, _PUBLISHED, f"{what}.{label}.published.")
        for key, value in published.items():
            if key != "note" and (isinstance(value, bool) or not isinstance(value, (int, float, type(None)))):
                raise UserError(f"{what}.{label}.published.{key}: {value} must be a number")
        settings = line.get("set") or []
        if not (isinstance(settings, list) and all(isinstance(setting, str) for setting in settings)):
            raise UserError(f"{what}.{label}.set: {settings} must be a list such as [inner.loss=mse]")
        published = {key: value for key, value in published.items() if value is not None}
        lines[label] = Line(str(line.get("title") or label), tuple(settings), published)
    return lines


def _check_label(label: Any, what: str) -> None:
    """A label is typed on the command line, so it must be text there: not 0.5, not null, no comma."""
    try:
        override = OverridesParser.create().parse_override(f"row={label}")
        good = isinstance(label, str) and not override.is_sweep_override() and override.value() == label
    except HydraException:
        good = False
    if not good or not set(label) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-+"):
        raise UserError(
            f"{what}: the label {label!r} must be letters, digits and _ . + -, and no number; title shows more"
        )


def expand_arguments(arguments: list[str], schema: type, configs: Path) -> list[str]:
    """Arguments with ``ablation=NAME`` replaced by what it stands for; others come back as they are.

    With ``-m``: its recipe, rows, columns and seeds, as far as the arguments say nothing of them; a row then reads
    ``row=NAME/LABEL``, because Hydra would take ``ablation`` for one of its groups. Without: the settings themselves.

    Args:
        schema: dataclass of the configuration. configs: folder of the configurations.

    Raises:
        UserError: unknown ablation, row or column, or none of them where one is needed.
    """
    given = given_values(arguments, ("ablation", "row", "column", "engine.seed"))
    if "ablation" not in given:
        for what in ("row", "column"):
            if what in given:
                raise UserError(f"{what}={given[what][0]} needs the table that it belongs to: ablation=NAME")
        return arguments
    if len(given["ablation"]) > 1:
        raise UserError(f"ablation={','.join(given['ablation'])}: one table is one sweep; start one after the other")
    ablation = load_ablation(given["ablation"][0], configs)
    _check_path(ablation.name)
    chosen = {what: _labels(ablation, what, given.get(what)) for what in ("row", "column")}
    flags = [a for a in arguments if a.startswith("-")]  # Hydra wants what is no flag in one piece
    rest = [a for a in arguments if a not in flags and _key(a) not in ("ablation", "row", "column")]
    if set(arguments) & set(MULTIRUN):
        qualified = {what: [f"{ablation.name}/{label}" for label in labels] for what, labels in chosen.items()}
        labels = [f"{what}={','.join(values)}" for what, values in qualified.items() if values]
        recipe = [f"recipe={ablation.recipe}"] if ablation.recipe and not _names_recipe(arguments) else []
        seeds = [] if "engine.seed" in given else [f"engine.seed={','.join(map(str, ablation.seeds))}"]
        return [*flags, *recipe, *rest, *labels, *seeds]
    for what, labels in chosen.items():
        if labels and what not in given:
            choice = ", ".join(labels)
            raise UserError(f"ablation={ablation.name} is a table; add -m for all of it, or {what}= one of: {choice}")
        if len(labels) > 1:
            raise UserError(f"{what}={','.join(labels)} names several; add -m for one run each")
    labels = [f"{what}={ablation.name}/{labels[0]}" for what, labels in chosen.items() if labels]
    return [*flags, *settled([*rest, *labels], schema, configs), *labels]


def settled(overrides: Sequence[str], schema: type, configs: Path) -> list[str]:
    """The overrides of one job with its row and column replaced by their settings, which come last.

    Args:
        overrides: as :func:`expand_arguments` made them. schema, configs: as there.

    Raises:
        UserError: unknown names.
    """
    given = given_values(overrides, ("row", "column"))
    settings, recipe = [], []
    for what in ("column", "row"):
        for qualified in given.get(what, ()):
            name, label = split_label(qualified)
            ablation = load_ablation(name, configs)
            [label] = _labels(ablation, what, [label])
            lines = ablation.columns if what == "column" else ablation.rows
            try:
                settings += check_arguments(list(lines[label].set), schema, configs)
            except UserError as error:
                raise UserError(f"ablation {name}, {what} {label}: {error}") from error
            if ablation.recipe and not _names_recipe(overrides):
                recipe = [f"recipe={ablation.recipe}"]
    rest = [override for override in overrides if _key(override) not in ("row", "column")]
    last = {_key(override): override for override in [*recipe, *rest, *settings]}  # Hydra wants each key once
    return list(last.values())


def split_label(label: str) -> tuple[str, str]:
    """``NAME/LABEL`` -> name of the ablation, label."""
    ablation, _, label = label.rpartition("/")
    return ablation, label


def _labels(ablation: Ablation, what: str, given: list[str] | None) -> list[str]:
    """The labels that were given, or all of the ablation."""
    known = ablation.rows if what == "row" else ablation.columns
    for label in given or ():
        if not known:
            raise UserError(f"{what}={label}: ablation {ablation.name} has no {what}s")
        if label not in known:
            raise UserError(f"{what}={label} is no {what} of ablation {ablation.name}; {nearest(label, known)}")
    return list(given or known)


def _names_recipe(arguments: Sequence[str]) -> bool:
    """Whether they say which recipe, or that there is to be none (``recipe=null``)."""
    return any(_key(argument) == "recipe" for argument in arguments)


def _check_path(name: str) -> None:
    """The path of a file of the user's goes into ``row=PATH/LABEL``, which Hydra must be able to read."""
    try:
        good = OverridesParser.create().parse_override(f"row={name}/x").value() == f"{name}/x"
    except HydraException:
        good = False
    if not good:
        raise UserError(f"ablation={name}: Hydra cannot read this path; give the file one of letters, digits and _ . -")


def _parsed(argument: str) -> Override:
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException as error:
        raise UserError(f"'{argument}' is no key=value ({str(error).splitlines()[0]})") from error


def _key(argument: str) -> str:
    return argument.split("=")[0].lstrip("+")


def given_values(arguments: Sequence[str], keys: Sequence[str]) -> dict[str, list[str]]:
    """Values of those ``keys`` that the arguments set to something, as text, with no escapes or quotes.

    Raises:
        UserError: an argument that is no key=value.
    """
    found = {}
    for argument in arguments:
        if _key(argument) in keys and "=" in argument:
            override = _parsed(argument)
            if override.is_sweep_override():
                values = override.sweep_string_iterator()  # which writes a space as "\\ "
                found[_key(argument)] = [str(_parsed(f"{_key(argument)}={value}").value()) for value in values]
            elif override.value() is not None:
                found[_key(argument)] = [str(override.value())]
    return found
