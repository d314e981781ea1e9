"""Heads for multi-token prediction: made, saved, loaded, and drafting."""

from treadle_speculative.mtp.drafter import MtpDrafter
from treadle_speculative.mtp.files import HeadFile, load_head, save_head
from treadle_speculative.mtp.head import HeadForm, MtpHead
from treadle_speculative.mtp.native import find_heads

__all__ = [
    "HeadFile",
    "HeadForm",
    "MtpDrafter",
    "MtpHead",
    "find_heads",
    "load_head",
    "save_head",
]
