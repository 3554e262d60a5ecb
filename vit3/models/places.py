"""Where weights lie: a file, a folder, an address, a repository of the Hugging Face hub, or a published name."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import torch

from vit3.files import sha256_of
from vit3.models.unpickle import WeightsError

logger = logging.getLogger(__name__)

# The layout of folders and of repositories, which timm reads too
WEIGHTS, CONFIG = "model.safetensors", "config.json"
FOLDER = "local-dir:"  # before a folder, as timm writes it
_HUB = ("hf-hub:", "hf_hub:")
_TYPES = {"label_names": (list, dict), "sha256": (str,)}
_TYPES |= {key: (dict,) for key in ("model_args", "pretrained_cfg", "training", "source")}
_WAYS = ("bicubic", "bilinear", "nearest", "box", "hamming", "lanczos")  # timm's names of interpolations
_MOST = 100_000  # pixels a side; no image has more, and memory for more ends the process
_ADDRESS = re.compile(r"(https?|file)://", re.IGNORECASE)
_CHECKSUM = re.compile(r"sha256=[0-9a-fA-F]{64}")


def resolve(place: str | Path, sha256: str | None = None, cache_dir: str | Path | None = None) -> Path:
    """The local file of some weights; what lies elsewhere is fetched first, once.

    Args:
        place: a file; a folder in timm's hub layout, also as ``local-dir:FOLDER``; an address (http, https, file),
            also as ``ADDRESS#sha256=HEX``; ``hf-hub:OWNER/NAME[@REVISION]``; or the name of a model with published
            weights. What exists as a path is taken as a path.
        sha256: what the file's SHA-256 must be, in hexadecimal. Without it, that of a folder or a repository is held
            against the one in its ``config.json``, if that has one.
        cache_dir: folder for what is fetched; as torch and huggingface_hub choose, if None.

    Raises:
        FileNotFoundError: there is no such place.
        WeightsError: it cannot be fetched, a folder holds no weights, or a file has another SHA-256.
    """
    text = str(place).removeprefix(FOLDER)
    path = Path(text).expanduser()
    if path.is_file():
        return checked(path, sha256)
    if path.is_dir():
        return _in_folder(path, sha256)
    if _ADDRESS.match(text):
        address, _, fragment = text.partition("#")
        if fragment and not _CHECKSUM.fullmatch(fragment):
            raise WeightsError(f"{place} ends in #{fragment}, which checks nothing; end it in #sha256= and 64 "
                               "hexadecimal digits, or in nothing")  # fmt: skip
        return download(address, sha256 or fragment.partition("=")[2] or None, cache_dir)
    if text.startswith(_HUB):
        return _from_hub(text.partition(":")[2], sha256, cache_dir)
    if (published := _published(text, cache_dir)) is not None:
        return checked(published, sha256)
    raise FileNotFoundError(f"{place}: no such file; weights are a file, a folder with {WEIGHTS}, an address, "
                            "hf-hub:OWNER/NAME, or a published model such as h_vit3_tiny")  # fmt: skip


def checked(path: Path, sha256: str | None) -> Path:
    """``path``, if its SHA-256 is the one given (None: any).

    Raises:
        WeightsError: it is another one.
    """
    if sha256 is not None and (found := sha256_of(path)) != sha256.lower():
        raise WeightsError(f"{path} has the SHA-256 {found}, but {sha256} was expected: the file is damaged or another")
    return path


def download(address: str, sha256: str | None = None, cache_dir: str | Path | None = None) -> Path:
    """Fetch a file into torch's folder of checkpoints, whole or not at all, unless it is there.

    Its name there tells addresses with the same last part from each other. A file that is there with another SHA-256
    is fetched again.

    Raises:
        WeightsError: it cannot be fetched, or has another SHA-256.
    """
    folder = Path(cache_dir) if cache_dir else Path(torch.hub.get_dir()) / "checkpoints"
    try:
        name = PurePosixPath(unquote(urlsplit(address).path)).name
    except ValueError as error:
        raise WeightsError(f"{address} is no address ({error}); mend it") from error
    path = folder / f"{hashlib.sha256(address.encode()).hexdigest()[:12]}-{name}"
    if path.is_file() and sha256 in (None, sha256_of(path)):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    logger.info("%s: downloading to %s", address, path)
    arriving = path.with_name(f".{path.name}.arriving")
    try:
        torch.hub.download_url_to_file(address, str(arriving), progress=False)
        checked(arriving, sha256).replace(path)
    except WeightsError as error:
        raise WeightsError(f"{address}: {error}") from error
    except (OSError, HTTPException) as error:  # URLError and HTTPError are OSErrors
        raise WeightsError(f"{address} could not be downloaded ({error}); fetch it on a machine with network, and give "
                           "the file instead") from error  # fmt: skip
    finally:
        arriving.unlink(missing_ok=True)
    return path


def read_config(folder: Path) -> dict:
    """The ``config.json`` of a folder in timm's hub layout; empty if it has none.

    Raises:
        WeightsError: it is not readable.
    """
    path = folder / CONFIG
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} is not readable JSON ({error})") from error
    return config if isinstance(config, Mapping) else {}


def described(folder: Path) -> dict:
    """The ``config.json`` of a folder in timm's hub layout, whoever wrote it: values have the types of that layout.

    Raises:
        WeightsError: it is not readable, or a value is of another type; the key is named.
    """
    config = read_config(folder)
    if not isinstance(config.get("architecture"), str):
        raise WeightsError(f"{folder / CONFIG} names no architecture; give a folder in timm's layout")
    for key, kinds in _TYPES.items():
        if not isinstance(config.get(key), (*kinds, type(None))):
            raise WeightsError(f"{folder / CONFIG}: {key}={config[key]!r:.60} must be a {kinds[0].__name__}; mend it")
    about = config.get("pretrained_cfg") or {}
    size = about.get("input_size", (1, 1, 1))
    if not (isinstance(size, (list, tuple)) and len(size) == 3 and all(type(n) is int and 0 < n < _MOST for n in size)):
        raise WeightsError(f"{folder / CONFIG}: input_size={size!r:.60} must be [channels,height,width], each above 0 "
                           f"and below {_MOST:,}; mend it")  # fmt: skip
    for key in ("mean", "std"):
        if not (isinstance(about.get(key, []), (list, tuple)) and all(map(_is_number, about.get(key, [])))):
            raise WeightsError(f"{folder / CONFIG}: {key}={about[key]!r:.60} must be a list of numbers; mend it")
    if not (_is_number(crop := about.get("crop_pct", 1)) and crop > 0):
        raise WeightsError(f"{folder / CONFIG}: crop_pct={crop!r:.60} must be a number above 0; mend it")
    if (way := about.get("interpolation", _WAYS[0])) not in _WAYS:
        raise WeightsError(f"{folder / CONFIG}: interpolation={way!r:.60} must be one of: {', '.join(_WAYS)}; mend it")
    places = {"num_classes": config, "model_args.num_classes": config.get("model_args") or {},
              "pretrained_cfg.num_classes": about}  # fmt: skip
    counts = {key: place["num_classes"] for key, place in places.items() if place.get("num_classes") is not None}
    if len(set(map(repr, counts.values()))) > 1:  # timm would leave the classifier fresh
        said = ", ".join(f"{key}={value!r:.60}" for key, value in counts.items())
        raise WeightsError(f"{folder / CONFIG}: {said} must be one number; mend it")
    return config


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _in_folder(folder: Path, sha256: str | None) -> Path:
    """The weights of a folder in timm's hub layout."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise WeightsError(f"{folder} is a folder without {WEIGHTS}; give one of its files")
    return checked(path, sha256 or read_config(folder).get("sha256"))


def _from_hub(repository: str, sha256: str | None, cache_dir: str | Path | None) -> Path:
    """The weights of ``OWNER/NAME[@REVISION]``."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise WeightsError(f"hf-hub:{repository} needs huggingface_hub: pip install huggingface_hub") from error
    name, _, revision = repository.partition("@")
    options = dict(repo_id=name, revision=revision or None, cache_dir=cache_dir)
    try:
        path = Path(huggingface_hub.hf_hub_download(filename=WEIGHTS, **options))
        config = Path(huggingface_hub.hf_hub_download(filename=CONFIG, **options)).parent
    except Exception as error:  # its own classes, httpx's or requests', by version
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeightsError(f"hf-hub:{repository} could not be fetched ({reason}); OWNER/NAME must be a repository "
                           f"with {WEIGHTS} and {CONFIG}") from error  # fmt: skip
    return checked(path, sha256 or read_config(config).get("sha256"))


def _published(name: str, cache_dir: str | Path | None) -> Path | None:
    """The file of a published model, fetched and converted; None if ``name`` is none."""
    from vit3.models.published import fetch, linked  # which loads weights, by way of here

    if name not in linked():
        return None
    try:
        return fetch(name, cache_dir)
    except RuntimeError as error:
        raise WeightsError(str(error)) from error
