"""Whether neck and heads take the maps that the backbone gives, before the first step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from vit3.errors import UserError


def check_channels(model: nn.Module) -> None:
    """Compare the channels of a backbone of ours with what the parts after it are made for.

    The libraries find out in the first update, by an assertion without words or an error of a convolution.

    Args:
        model: a detector or segmentor, wrapped or not.

    Raises:
        UserError: another number of maps, or other channels.
    """
    model = getattr(model, "module", model)
    maps = getattr(getattr(model, "backbone", None), "channels", None)
    if maps is None:
        return
    neck = getattr(model, "neck", None)
    if neck is not None:
        wanted = getattr(neck, "in_channels", None)
        if isinstance(wanted, Sequence) and list(wanted) != list(maps):
            raise UserError(_sentence("neck", list(wanted), list(maps)))
        return
    for name in ("decode_head", "auxiliary_head"):
        part = getattr(model, name, None)
        for head in part if isinstance(part, nn.ModuleList) else [part]:
            places, wanted = getattr(head, "in_index", None), getattr(head, "in_channels", None)
            if places is None or wanted is None:
                continue
            wanted = wanted if isinstance(wanted, int) else list(wanted)
            places = [places] if isinstance(places, int) else list(places)
            if max(places) >= len(maps):
                raise UserError(
                    f"model.{name}.in_index={places} asks for a map that the backbone, which gives {len(maps)}, has "
                    "not; set it and in_channels to maps that out_indices names"
                )
            given = [maps[place] for place in places]
            if (sum(given) if isinstance(wanted, int) else given) != wanted:  # of several, a head may know the sum
                raise UserError(_sentence(name, wanted, given if len(given) > 1 else given[0]))


def _sentence(part: str, wanted: int | list[int], given: int | list[int]) -> str:
    return f"model.{part}.in_channels={wanted} is not what the backbone gives; set model.{part}.in_channels={given}"
