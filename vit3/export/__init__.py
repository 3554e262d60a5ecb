"""Networks that leave this codebase: files of other formats, each compared with the network itself."""

from vit3.export.subject import KINDS, Subject

__all__ = ["KINDS", "Subject"]
