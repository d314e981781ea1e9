"""The folder of a run: what it keeps so that it can go on, and what it leaves when it is done.

``fit.json`` names everything else and is always replaced as a whole, so that it is the one place where
something becomes true. Beside it, while the run goes on: ``fit-<step>.safetensors``, the state behind a
step, and ``answers.json``, what the model has written so far. Both are gone when the head is there.
"""

import json
import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from msgspec import Struct

from treadle_core.errors import Unsupported, describe
from treadle_speculative.mtp.files import DESCRIPTION, WEIGHTS
from treadle_speculative.mtp.fit.training import State

RUN = "fit.json"
ANSWERS = "answers.json"
REPORT = "report.json"
FORMAT = "treadle-mtp-fit-1"


class RunFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An unfinished run.

    Attributes:
        settings: All that its result depends on, by name.
        step: Steps that are done.
        seconds: What they took.
        weights: Name of the file with the state behind them; empty where there is none yet.
        digest: Of that file.
        format: Of these files.
    """

    settings: dict[str, Any]
    step: int = 0
    seconds: float = 0.0
    weights: str = ""
    digest: str = ""
    format: str = FORMAT


class AnswersFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the model wrote, in the order of its prompts, and the digest of that."""

    answers: list[list[int]]
    digest: str


class Folder:
    """The folder of a run.

    Args:
        path: Where; made if absent.
        settings: All that the result depends on, by name.
        overwrite: Whether what is there may be replaced.

    Raises:
        Unsupported: There is a head already, or a run that is not this one or is damaged.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, overwrite: bool) -> None:
        self.path = path
        self._settings: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings))
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unsupported(f"out: {path} cannot be a folder: {error.strerror}") from None
        if overwrite:
            self._empty()
        self._refuse_finished()
        self.run = self._read_run()

    def save(self, state: State, seconds: float) -> None:
        """Keep the state behind a step."""
        before = self.run.weights
        name = f"fit-{state.step}.safetensors"
        spelled = self.path / f"writing-{name}"
        mx.save_safetensors(str(spelled), state.arrays)
        digest = digest_of(spelled.read_bytes())
        replace_by(spelled, self.path / name)
        self.run = RunFile(
            settings=self._settings, step=state.step, seconds=seconds, weights=name, digest=digest
        )
        write(self.path / RUN, msgspec.json.encode(self.run))
        if before and before != name:
            (self.path / before).unlink(missing_ok=True)

    def load(self) -> State | None:
        """The state that was kept last; None if the run has only begun.

        Raises:
            Unsupported: It is damaged.
        """
        run = self.run
        if not run.weights:
            return None
        try:
            content = (self.path / run.weights).read_bytes()
            if digest_of(content) != run.digest:
                raise self._damaged(run.weights, "its digest is another")
            arrays: Any = mx.load(str(self.path / run.weights))
        except (OSError, RuntimeError, ValueError) as error:
            raise self._damaged(run.weights, describe(error)) from error
        return State(run.step, arrays)

    def save_answers(self, answers: Sequence[Sequence[int]]) -> None:
        """Keep what the model has written so far."""
        write(self.path / RUN, msgspec.json.encode(self.run))
        listed = [list(answer) for answer in answers]
        kept = AnswersFile(answers=listed, digest=digest_of(json.dumps(listed).encode()))
        write(self.path / ANSWERS, msgspec.json.encode(kept))

    def load_answers(self) -> list[list[int]]:
        """What the model has written so far.

        Raises:
            Unsupported: It is damaged.
        """
        try:
            kept = msgspec.json.decode((self.path / ANSWERS).read_bytes(), type=AnswersFile)
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError) as error:
            raise self._damaged(ANSWERS, describe(error)) from error
        if digest_of(json.dumps(kept.answers).encode()) != kept.digest:
            raise self._damaged(ANSWERS, "its digest is another")
        return kept.answers

    def finish(self, report: Struct) -> None:
        """The head is there: leave the report, and nothing that only an unfinished run needs."""
        content = msgspec.json.format(msgspec.json.encode(report), indent=2)
        write(self.path / REPORT, content + b"\n")
        for name in (RUN, ANSWERS, self.run.weights):
            if name:
                (self.path / name).unlink(missing_ok=True)

    def _empty(self) -> None:
        names = [RUN, ANSWERS, REPORT, WEIGHTS, DESCRIPTION]
        names += [path.name for path in self.path.glob("fit-*.safetensors")]
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def _refuse_finished(self) -> None:
        # A head beside an unfinished run was being written when that was stopped.
        head = self.path / DESCRIPTION
        if head.exists() and not (self.path / RUN).exists():
            raise Unsupported(
                f"out: {self.path} has a finished head already; --overwrite replaces it"
            )

    def _read_run(self) -> RunFile:
        path = self.path / RUN
        if not path.exists():
            return RunFile(settings=self._settings)
        try:
            run = msgspec.json.decode(path.read_bytes(), type=RunFile)
        except (OSError, msgspec.DecodeError) as error:
            raise self._damaged(RUN, describe(error)) from error
        if run.format != FORMAT:
            raise self._damaged(RUN, f"its format is {run.format!r}, not {FORMAT!r}")
        self._compare(run.settings)
        return run

    def _compare(self, settings: dict[str, Any]) -> None:
        differing = sorted(
            name
            for name in settings.keys() | self._settings.keys()
            if settings.get(name) != self._settings.get(name)
        )
        if differing:
            shown = ", ".join(
                f"{name} ({settings.get(name)!r}, now {self._settings.get(name)!r})"
                for name in differing
            )
            raise Unsupported(
                f"out: {self.path} has an unfinished run with other settings: {shown}; "
                "repeat them to go on, or --overwrite to begin anew"
            )

    def _damaged(self, name: str, reason: str) -> Unsupported:
        return Unsupported(f"out: {self.path / name} is damaged: {reason}; --overwrite begins anew")


def digest_of(content: bytes) -> str:
    """A digest that accidents change."""
    return blake2b(content, digest_size=16).hexdigest()


def write(path: Path, content: bytes) -> None:
    """Replace a file as a whole."""
    beside = path.with_name(f"writing-{path.name}")
    beside.write_bytes(content)
    replace_by(beside, path)


def replace_by(written: Path, path: Path) -> None:
    """Put a file in the place of another, once it is on the disk."""
    with written.open("rb") as file:
        os.fsync(file.fileno())
    written.replace(path)
