"""What was exported and how equal it is: ``export.json`` for programs and ``export.md`` for people."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vit3.export.subject import Subject
from vit3.export.verify import BOUND, Check
from vit3.files import replacing, sha256_of


@dataclass(frozen=True)
class Result:
    """One format that was written.

    Attributes:
        format: its name, as it was asked for.
        files: what was written; the one to open first.
        checks: of :func:`vit3.export.verify.verify`. seconds: it took to write.
        dynamic: axes that are free. lowest: smallest side where sizes are free. multiple: of which these sides are.
        error: why it could not be written or, where there are files, not be compared; in a sentence.
        bound: largest difference that passes. relative: it counts relative to the network's largest output.
    """

    format: str
    files: tuple[Path, ...]
    checks: tuple[Check, ...]
    dynamic: tuple[str, ...] = ()
    lowest: int | None = None
    multiple: int = 1
    seconds: float = 0.0
    error: str | None = None
    bound: float = BOUND
    relative: bool = False

    @property
    def passed(self) -> bool:
        """Whether there were checks and all of them are as they should be."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def difference(self) -> float:
        """The largest one over all declared shapes; NaN where one could not be compared."""
        found = [math.nan if c.difference is None else c.difference for c in self.checks if c.declared]
        return math.nan if not found or any(map(math.isnan, found)) else max(found)


def write_report(folder: Path, subject: Subject, results: Sequence[Result]) -> Path:
    """Write ``export.json`` and ``export.md`` into ``folder``; returns the path of the latter.

    What an earlier report there says of other files stays, as long as these are the same.

    Args:
        folder: where the files of ``results`` are, or above them. subject: what was exported. results: by format.
    """
    folder = Path(folder)
    about = {key: getattr(subject, key) for key in ("name", "kind", "kwargs", "img_size", "weights", "source")}
    entries = [{**_entry(folder, result), "weights": subject.weights} for result in results]
    entries = [*_kept(folder, entries), *entries]
    passed = all(entry["passed"] for entry in entries)
    text = json.dumps({**about, "passed": passed, "formats": entries}, indent=2, default=str)
    for name, content in (("export.json", text), ("export.md", "\n".join(_lines(subject, entries)))):
        with replacing(folder / name) as file:
            file.write(f"{content}\n".encode())
    return folder / "export.md"


def figure(value: float | str | None) -> str:
    """A difference with one significant digit; ``-`` for none."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:.0e}"


def _entry(folder: Path, result: Result) -> dict:
    """A result as plain values."""
    files = [
        dict(file=path.relative_to(folder).as_posix(), bytes=path.stat().st_size, sha256=sha256_of(path))
        for path in map(Path, result.files)
    ]
    numbers = ("difference", "outputs")
    checks = [{**asdict(c), **{name: _plain(getattr(c, name)) for name in numbers}} for c in result.checks]
    return dict(
        format=result.format,
        passed=result.passed,
        difference=_plain(result.difference),
        bound=result.bound,
        relative=result.relative,
        dynamic=list(result.dynamic),
        lowest=result.lowest,
        multiple=result.multiple,
        seconds=round(result.seconds, 1),
        error=result.error,
        files=files,
        checks=checks,
    )


def _kept(folder: Path, entries: Sequence[dict]) -> list[dict]:
    """Entries of an earlier report whose files are still there, unchanged, and not among those of ``entries``."""
    try:
        earlier = json.loads((folder / "export.json").read_text(encoding="utf-8"))["formats"]
        new = {file["file"] for entry in entries for file in entry["files"]}
        return [
            entry for entry in earlier
            if entry["files"] and not new & {file["file"] for file in entry["files"]}
            and all((folder / file["file"]).is_file() for file in entry["files"])
            and all(sha256_of(folder / file["file"]) == file["sha256"] for file in entry["files"])
        ]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or not of ours
        return []


def _plain(value: float | None) -> float | str | None:
    """A number as JSON has it, or else its name."""
    return value if value is None or math.isfinite(value) else str(value)


def _lines(subject: Subject, entries: Sequence[dict]) -> Iterator[str]:
    height, width = subject.img_size
    yield f"# Export of {subject.name}"
    yield ""
    yield f"{subject.kind}, {subject.weights} weights, nominal size {height} x {width}."
    if subject.source:
        yield f"Source: {subject.source.get('file', '-')}, SHA-256 {subject.source.get('sha256', '-')}."
    yield ""
    yield "| format | file | weights | MB | SHA-256 | free | largest difference | bound | result |"
    yield "|---|---|---|---:|---|---|---:|---:|---|"
    for entry in entries:
        free = ", ".join(entry["dynamic"]) or "nothing"
        if "size" in entry["dynamic"] and entry["lowest"]:
            steps = f", multiples of {entry['multiple']}" if entry["multiple"] > 1 else ""
            free += f" (sides from {entry['lowest']}{steps})"
        if entry["error"]:
            what = "not compared" if entry["files"] else "not written"
            yield f"| {entry['format']} | {what}: {entry['error']} | | | | | | | **failed** |"
        kind = " of the range" if entry["relative"] else ""
        for i, file in enumerate(entry["files"]):
            figures = f"{figure(entry['difference'])}{kind} | {figure(entry['bound'])}{kind} | {_word(entry['passed'])}"
            row = f"{file['file']} | {entry['weights']} | {file['bytes'] / 1e6:.2f} | `{file['sha256']}`"
            yield f"| {entry['format']} | {row} | {free if i == 0 else ''} | {figures if i == 0 else ' |  | '} |"
    for title, declared in (
        ("Shapes that were declared, compared with the network itself", True),
        ("Shapes that were not declared: refused, or right", False),
    ):
        yield f"\n## {title}\n"
        yield "| format | shape | what | difference | largest output | result |"
        yield "|---|---|---|---:|---:|---|"
        for entry in entries:
            for c in entry["checks"]:
                if c["declared"] == declared:
                    shape = " x ".join(map(str, c["shape"]))
                    row = (
                        f"{shape} | {c['what'].replace('|', '/')} | {figure(c['difference'])} | {figure(c['outputs'])}"
                    )
                    yield f"| {entry['format']} | {row} | {_word(c['passed'])} |"


def _word(passed: bool) -> str:
    return "passed" if passed else "**failed**"
