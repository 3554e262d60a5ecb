"""WebDataset shards read one after another, on timm's reader: for training data that is not on this machine."""

from __future__ import annotations

import importlib.util
import io
import json
import multiprocessing
import warnings
from collections.abc import Iterator, Sequence

from PIL import Image
from timm.data import IterableImageDataset

from vit3.data.classes import check_known
from vit3.data.folder import DECODE_ERRORS, converted, image_mode
from vit3.data.shard_index import IMAGE_ENDINGS
from vit3.data.shards import CLASSES_KEY, INFO_NAMES
from vit3.data.splits import choose_split
from vit3.errors import UserError


class StreamedImages(IterableImageDataset):
    """Training images in a shuffled stream; an epoch has as many as the split, a few of them perhaps twice or never.

    Every loader process reads whole shards of its own, in an order that follows from the epoch, through a buffer of
    8,192 samples (the first is given out when 2,048 are there); timm's WDS_SHUFFLE_SIZE and WDS_INITIAL_SIZE.

    Args:
        root: folder, ``http(s)://...`` or ``pipe:...`` that file names are put behind; the info file lies there.
        in_chans: 1 or 3.
        on_bad_image: ``raise``, or ``skip`` to count an image and go on with the next of the stream. A shard that ends
            too early is logged by timm and left in both cases.
        wanted: split of the info file, None for the usual; or shards in braces and their number of images,
            ``NAME-{0000..0099}.tar|128000``.
        classes: the map; None takes the stored names. key: what the user calls ``root``.
        input_key: endings of images. target_key: field of the ``.json`` member with the label; None reads ``.cls``.

    Attributes:
        classes: names in label order. transform: applied to each image; the loader sets it.
        bad_images: shared counter of images left out, over all loader processes.

    Raises:
        UserError: package missing, no info file, no such split, no class names.
    """

    def __init__(
        self, root: str, in_chans: int, on_bad_image: str, *, wanted: str | None = None,
        classes: Sequence[str] | None = None, key: str = "data.root", input_key: str | None = None,
        target_key: str | None = None,
    ):  # fmt: skip
        mode = image_mode(in_chans)
        if importlib.util.find_spec("webdataset") is None:
            raise UserError("reading shards as a stream needs the package webdataset; pip install webdataset")
        from timm.data.readers.reader_wds import _load_info

        from vit3.data.stream_reader import StreamReader

        self.where = f"{key}={root}"
        info = _load_info(root)
        if not (wanted and ".tar" in wanted):
            if "splits" not in info:
                raise UserError(f"{self.where} has no readable {' or '.join(INFO_NAMES)}, which names the shards")
            wanted = choose_split("train", info["splits"], wanted, self.where)
        names = info.get(CLASSES_KEY)
        if not names:
            raise UserError(
                f"{self.where}: the info file names no classes, and a stream does not tell how many there are; add "
                f'"{CLASSES_KEY}": [names in label order] to it'
            )
        self.classes = tuple(names if classes is None else classes)
        check_known(names, self.classes, self.where)
        self.labels = [self.classes.index(name) for name in names]
        try:
            reader = StreamReader(self.decode_sample, root=root, split=wanted, is_training=True)
        except (RuntimeError, KeyError, ValueError) as error:  # timm's: no number of images, an unknown shard
            raise UserError(
                f"data.train_split={wanted} names no shards of {self.where} ({error}); write a split of the info file, "
                "or shards and their number of images as NAME-{0000..0099}.tar|128000"
            ) from error
        super().__init__(root, reader=reader, input_img_mode=mode)
        self.mode, self.skip = mode, on_bad_image == "skip"
        self.endings = (input_key or IMAGE_ENDINGS).split(";")
        self.field = target_key or reader.split_info.alt_label or None
        self.bad_images = multiprocessing.Value("q", 0)

    def __len__(self) -> int:
        """Images of the split, for all processes together."""
        return self.reader.num_samples

    def __iter__(self) -> Iterator:
        shards, workers = len(self.reader.split_info.filenames), self.reader.workers()
        if shards < workers:
            raise UserError(
                f"{self.where} has {shards} shards for {workers} loader processes; lower data.workers or pack into "
                "more shards"
            )
        return super().__iter__()

    def decode_sample(self, sample: dict) -> dict | None:
        """Image and label of one sample of the stream; None where it is left out.

        Raises:
            UserError: it cannot be decoded and is not to be skipped, or its label cannot be read.
        """
        name = f"{sample.get('__url__')}:{sample.get('__key__')}"
        try:
            label = self.labels[int(json.loads(sample["json"])[self.field] if self.field else sample["cls"])]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(
                f"the label of {name} cannot be read ({error!r}); set data.target_key to a field of its .json member, "
                "null for the .cls member"
            ) from error
        try:
            data = next((sample[ending] for ending in self.endings if ending in sample), None)
            if data is None:
                raise OSError(f"no member ends in {', '.join(self.endings)}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # corrupt metadata beside good pixels
                return dict(image=converted(Image.open(io.BytesIO(data)), self.mode), target=label)
        except DECODE_ERRORS as error:
            if not self.skip:
                raise UserError(
                    f"{name} cannot be decoded ({error}); repair or remove it, or set data.on_bad_image=skip"
                ) from error
        with self.bad_images.get_lock():
            self.bad_images.value += 1
        return None
