"""What is exported, from wherever its weights are: a run, a checkpoint of ours, a hub folder, a file of weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
from omegaconf import DictConfig, OmegaConf
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from vit3.build.generator import build_generator, latent_grid
from vit3.build.model import build_model
from vit3.build.trained import Stored, read_stored
from vit3.config import ExportConfig, TrainConfig, nearest
from vit3.errors import UserError, first_line
from vit3.export import Subject
from vit3.files import sha256_of
from vit3.inner import InnerSpec
from vit3.models import DENSE_NAMES, GENERATOR_NAMES, MODEL_NAMES
from vit3.models.places import CONFIG, WEIGHTS, checked, described, resolve
from vit3.models.unpickle import read_checkpoint
from vit3.models.weights import load_weights, match, read_tensors, stored_kinds

logger = logging.getLogger(__name__)

_DENSE = "_dense"
_FIRST = ("patch_embed.proj.weight", "patch_embed.conv.0.conv.weight", "x_embedder.proj.weight")


def build_subject(options: ExportConfig, complete: Callable[[dict], DictConfig]) -> Subject:
    """Load a network to export, with what its users have to know about it; its data need not be there.

    Args:
        options: which, and which of its weights. complete: see :func:`vit3.build.trained.read_stored`.

    Raises:
        UserError: no such checkpoint or model, weights that are not there, or a choice between raw and averaged ones
            that was not made.
    """
    path = Path(options.checkpoint)
    if options.model_name is not None and not timm.is_model(options.model_name):
        known = (*MODEL_NAMES, *DENSE_NAMES, *GENERATOR_NAMES)
        raise UserError(f"model_name={options.model_name} is no registered model; {nearest(options.model_name, known)}")
    if path.name == WEIGHTS and (path.parent / CONFIG).is_file() and options.model_name is None:
        path = path.parent
    try:
        if (path / CONFIG).is_file():
            subject = _from_hub_folder(path, options)
        elif path.is_dir() or _is_ours(path):
            subject = _from_run(path, options, complete)
        else:
            subject = _from_weights(options)
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        raise UserError(f"checkpoint={options.checkpoint}: {error}") from error
    if options.img_size is not None:
        subject = replace(subject, img_size=tuple(options.img_size))
    return replace(subject, model=subject.model.float().cpu().eval())


def _from_run(path: Path, options: ExportConfig, complete: Callable[[dict], DictConfig]) -> Subject:
    """A checkpoint of ours, or a run folder."""
    path = _chosen_file(path, options.weights)
    stored = read_stored(str(path), complete, newest=True)
    checked(stored.path, options.sha256)
    held = [kind for kind, key in (("raw", "state_dict"), ("ema", "state_dict_ema")) if key in stored.state]
    kind = _chosen_kind(held, options.weights, "the checkpoint")
    if stored.cfg.diffusion is not None:
        model, kwargs = _generator(stored)
        what = "generator"
    else:
        model, kwargs, what = build_model(stored.cfg, stored.classes), _arguments(stored.cfg, len(stored.classes)), None
    stored.load_into(model, kind)
    subject = Subject(
        model=model,
        kind=what or "classifier",
        name=stored.cfg.model.name,
        kwargs=kwargs,
        img_size=model.img_size if what else tuple(stored.cfg.data.img_size),
        classes=stored.classes,
        preprocessing={} if what else _preprocessing(stored.cfg),
        weights=kind,
        training=_training(stored, kind),
        source={"file": stored.path.name, "sha256": sha256_of(stored.path)},
    )
    return _by_name(subject, options.model_name)


def _by_name(subject: Subject, name: str | None) -> Subject:
    """What a checkpoint holds; of a classifier its backbone, if ``model_name`` asks for that."""
    if name in (None, subject.name):
        return subject
    backbone = f"{subject.name}{_DENSE}" if f"{subject.name}{_DENSE}" in DENSE_NAMES else None
    if name != backbone:
        also = f", or use model_name={backbone}" if backbone else ""
        raise ValueError(f"model_name={name}, but the checkpoint holds {subject.name}; leave model_name out{also}")
    return _backbone_of(subject, name)


def _backbone_of(subject: Subject, name: str) -> Subject:
    """A classifier's backbone, as detectors start with it: the norms of its maps are fresh."""
    kwargs = {key: value for key, value in subject.kwargs.items() if key in ("in_chans", "mixer", "mixer_kwargs")}
    model = timm.create_model(name, **kwargs)
    tensors = subject.model.state_dict()
    found = match(tensors, model)
    lacking = [key for key in (*found.missing, *found.reshaped) if not key.startswith(model.fresh)]
    if lacking:
        raise ValueError(f"the {subject.name} in it lacks {len(lacking)} tensors of {name} or has them in another "
                         f"shape, {lacking[0]} and so on: {name} has the published depths and widths; "
                         "leave model_name out")  # fmt: skip
    model.load_state_dict({key: tensors[key] for key in found.matched}, strict=False)
    logger.info("%s: the norms of its maps (%s) are fresh, a classifier has none", name, ", ".join(model.fresh))
    return replace(subject, model=model, kind="features", name=name, kwargs=kwargs, classes=None)


def _from_weights(options: ExportConfig) -> Subject:
    """A file of weights by our names, from a disk, an address or the hub; or a published network by its name."""
    path = resolve(options.checkpoint, sha256=options.sha256)
    if options.model_name is None:
        raise ValueError("the file does not say which model it is; set model_name=NAME, such as model_name=h_vit3_tiny")
    stored = _chosen_kind(stored_kinds(path), options.weights, "the file")
    ema = "ema" in (stored, options.weights)
    name = options.model_name
    kwargs = _sizes(read_tensors(path, ema=ema), name)
    model = timm.create_model(name, **kwargs)
    report = load_weights(model, path, ema=ema)
    logger.info("%s", report)
    kind = _kind(name)
    lacking = [key for key in (*report.missing, *report.reshaped) if not key.startswith(getattr(model, "fresh", ()))]
    if lacking:
        raise ValueError(f"the file lacks {len(lacking)} tensors of {name} or has them in another shape, "
                         f"{lacking[0]} and so on; give the checkpoint of the training or its hub folder")  # fmt: skip
    cfg = {} if kind == "generator" else resolve_model_data_config(_described(model, name))
    size = model.img_size if kind == "generator" else cfg.pop("input_size")[-2:]
    return Subject(
        model=model,
        kind=kind,
        name=name,
        kwargs=kwargs,
        img_size=tuple(size),
        preprocessing=_known_preprocessing(cfg, model.in_chans),
        weights=stored,
        source={"file": path.name, "sha256": sha256_of(path)},
    )


def _from_hub_folder(path: Path, options: ExportConfig) -> Subject:
    """A folder in timm's hub layout."""
    if options.weights != "auto":
        raise ValueError(f"weights={options.weights} is no choice here, a hub folder holds one kind; leave it out")
    config = described(path)
    file = resolve(path, sha256=options.sha256)
    name, kwargs = config["architecture"], dict(config.get("model_args") or {})
    try:
        model = timm.create_model(f"local-dir:{path}", pretrained=True)
    except Exception as error:  # foreign arguments raise almost anything
        raise ValueError(f"it cannot be loaded as {name}: {first_line(error)}") from error
    cfg = config.get("pretrained_cfg", {})
    classes = cfg.get("label_names") or config.get("label_names")
    kind = _kind(name)
    subject = Subject(
        model=model,
        kind=kind,
        name=name,
        kwargs=kwargs,
        img_size=tuple(model.img_size if kind == "generator" else cfg["input_size"][-2:]),
        classes=tuple(classes) if classes else None,
        preprocessing=_known_preprocessing(cfg, model.in_chans),
        weights=config.get("weights", "stored"),
        training=config.get("training", {}),
        source=config.get("source") or {"file": file.name, "sha256": sha256_of(file)},
    )
    return _by_name(subject, options.model_name)


def _kind(name: str) -> str:
    """Which of :data:`vit3.export.KINDS` a registered model is."""
    return "generator" if name in GENERATOR_NAMES else "features" if name in DENSE_NAMES else "classifier"


def _is_ours(path: Path) -> bool:
    """Whether a file is a checkpoint of ours, with its configuration."""
    if not path.is_file() or path.suffix == ".safetensors":
        return False
    content = read_checkpoint(path)
    return isinstance(content, dict) and {"format", "config", "classes"} <= content.keys()


def _chosen_file(path: Path, weights: str) -> Path:
    """Of a classifier's run folder the file of its best weights of the kind wanted; else ``path`` itself."""
    best = {kind: path / f"best_{kind}.pt" for kind in ("raw", "ema")}
    best = {kind: file for kind, file in best.items() if file.is_file()}
    if not best or _is_generator(path):
        return path
    if weights == "auto" and len(best) == 2:
        raise ValueError("the run kept its best raw and its best averaged weights; set weights=ema or weights=raw")
    if weights not in ("auto", *best):
        raise ValueError(f"weights={weights}, but the run kept {' and '.join(best)} weights; use weights={[*best][0]}")
    return best.get(weights, next(iter(best.values())))


def _is_generator(run: Path) -> bool:
    """Whether a run folder is that of a generator, whose newest checkpoint counts."""
    config = run / "config.yaml"
    return config.is_file() and OmegaConf.load(config).get("diffusion") is not None


def _chosen_kind(held: Sequence[str], wanted: str, what: str) -> str:
    """``raw`` or ``ema``; ``stored`` if what is held has no name. Of two kinds none is chosen for the user."""
    if wanted == "auto" and len(held) == 2:
        raise ValueError(f"{what} holds raw and averaged weights; set weights=ema or weights=raw")
    if wanted != "auto" and held and wanted not in held:
        raise ValueError(f"weights={wanted}, but {what} holds {held[0]} weights alone; use weights={held[0]}")
    return (held[0] if held else "stored") if wanted == "auto" or not held else wanted


class _Latents:
    """What a generator's network sees of images, as its checkpoint tells it: enough to build the network."""

    def __init__(self, stored: dict[str, Any]):
        self.channels, self._factor = stored["channels"], stored.get("factor", 1)

    def grid(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """(height, width) in latent pixels."""
        return img_size[0] // self._factor, img_size[1] // self._factor


def _generator(stored: Stored) -> tuple[nn.Module, dict[str, Any]]:
    """The network of a generator, and the arguments that build it again."""
    codec = _Latents(stored.state["codec"])
    model = build_generator(stored.cfg, stored.classes, codec)
    cfg, size = stored.cfg, list(latent_grid(stored.cfg, codec))
    own = dict(in_chans=codec.channels, learn_sigma=cfg.diffusion.learn_sigma, img_size=size)
    return model, {**cfg.model.kwargs, **own, "num_classes": len(stored.classes), **_mixer(cfg)}


def _arguments(cfg: TrainConfig, classes: int) -> dict[str, Any]:
    """Plain arguments with which timm builds the classifier of a configuration again."""
    own = dict(in_chans=cfg.data.in_chans, num_classes=classes)
    if cfg.model.name in MODEL_NAMES:
        own |= dict(img_size=list(cfg.data.img_size), **_mixer(cfg))
    return {**cfg.model.kwargs, **own}


def _mixer(cfg: TrainConfig) -> dict[str, Any]:
    """Arguments of the mixer, where it is not the released block."""
    if cfg.mixer.name != "ttt":
        return dict(mixer=cfg.mixer.name, mixer_kwargs=dict(cfg.mixer.kwargs))
    inner = {} if cfg.inner == InnerSpec() else dict(inner=cfg.inner.to_plain())
    kwargs = {**cfg.mixer.kwargs, **inner}
    return dict(mixer_kwargs=kwargs) if kwargs else {}


def _preprocessing(cfg: TrainConfig) -> dict[str, Any]:
    d = cfg.data
    return dict(mean=list(d.mean), std=list(d.std), interpolation=d.interpolation, crop_pct=d.crop_pct)


def _known_preprocessing(cfg: dict[str, Any], in_chans: int) -> dict[str, Any]:
    """What timm's configuration says of the test images; a mean of three colours says nothing of other channels."""
    known = {key: cfg[key] for key in ("mean", "std", "interpolation", "crop_pct", "crop_mode") if key in cfg}
    return {key: value for key, value in known.items() if key not in ("mean", "std") or len(value) == in_chans}


def _training(stored: Stored, kind: str) -> dict[str, Any]:
    """How the network was trained, and what was measured of these very weights."""
    cfg, state = stored.cfg, stored.state
    record, found = state.get("record") or {}, {}
    if "optimizer" not in state or not state["position"]:  # else the weights are younger than the last scores
        prefix = "val_ema/" if kind == "ema" else "val/"
        found = {name.removeprefix(prefix): value for name, value in record.items() if name.startswith(prefix)}
    return {
        **found,
        "dataset": cfg.data.name,
        "saved": stored.saved,
        "epochs": cfg.engine.epochs,
        "batch_size": cfg.engine.batch_size,
        "optimizer": cfg.optim.opt,
        "lr": cfg.optim.lr,
        "weight_decay": cfg.optim.weight_decay,
        "seed": cfg.engine.seed,
    }


def _sizes(tensors: dict[str, Tensor], name: str) -> dict[str, Any]:
    """Arguments that shapes in a file of our models' weights tell: the channels of the images, and the classes."""
    first = next((tensors[key] for key in _FIRST if key in tensors), None)
    found = {} if first is None else {"in_chans": first.shape[1]}
    if name in MODEL_NAMES and "head.weight" in tensors:
        found["num_classes"] = tensors["head.weight"].shape[0]
    if name in GENERATOR_NAMES and "y_embedder.embedding_table.weight" in tensors:
        found["num_classes"] = tensors["y_embedder.embedding_table.weight"].shape[0] - 1  # one stands for no class
    return found


def _described(model: nn.Module, name: str) -> nn.Module:
    """The model itself, or for a backbone of detectors the classifier that it is made of, for timm's configuration."""
    return model if name not in DENSE_NAMES else timm.create_model(name.removesuffix(_DENSE))
