"""Helpers for tests of the Treadle packages, and for yours: fakes of every port, without MLX.

Conformance suites are in :mod:`treadle_core.testing.contracts`, tiny random models (which need
MLX) in :mod:`treadle_core.testing.zoo`.
"""

from treadle_core.testing.checks import EventChecker, pump
from treadle_core.testing.fakes import (
    ByteTokenizer,
    ListConstraint,
    ManualClock,
    RecordingObserver,
    ScriptedConstraint,
    ScriptedEncoder,
    pack_mask,
)
from treadle_core.testing.prefixes import KeyedRow, RecordingStore, TokenRow, tokens_of
from treadle_core.testing.scripted import (
    SMALL_SPEC,
    Fault,
    Script,
    ScriptedFailure,
    ScriptedRunner,
    WrongPlan,
    answers,
    expected_tokens,
    hashed,
)

__all__ = [
    "SMALL_SPEC",
    "ByteTokenizer",
    "EventChecker",
    "Fault",
    "KeyedRow",
    "ListConstraint",
    "ManualClock",
    "RecordingObserver",
    "RecordingStore",
    "Script",
    "ScriptedConstraint",
    "ScriptedEncoder",
    "ScriptedFailure",
    "ScriptedRunner",
    "TokenRow",
    "WrongPlan",
    "answers",
    "expected_tokens",
    "hashed",
    "pack_mask",
    "pump",
    "tokens_of",
]
