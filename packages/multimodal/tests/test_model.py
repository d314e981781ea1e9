"""Logits of vision models in our runtime equal mlx-vlm's own run of one request."""

import numpy as np
import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from treadle_multimodal.media import Media
from treadle_multimodal.testing import zoo

from .vlm import TOLERANCE, Reference, Rows, difference, encoded, image

every_family = pytest.mark.parametrize("family", zoo.FAMILIES)

CONTINUATION = [70, 105, 33, 9, 120, 41]

REQUESTS: list[tuple[str, tuple[Media, ...]]] = [
    ("a text without any picture", ()),
    ("what is this?", (image(0),)),
    ("compare", (image(1, 120, 50), image(2))),
    ("text again, to have another length", ()),
    ("the same twice", (image(3, 150, 90), image(4, 60, 60), image(3, 150, 90))),
]


@every_family
@pytest.mark.parametrize("chunk", [8, 17, 1024])
def test_rows_with_and_without_media_decode_together(family: str, chunk: int) -> None:
    rows = Rows(family)
    expected = [Reference(family, *request).logits(CONTINUATION) for request in REQUESTS]
    for request in REQUESTS:
        rows.join(encoded(family, *request), chunk)

    found = [rows.decode([[prompt.tokens[-1]] for prompt in rows.prompts])]
    found += [rows.decode([[token]] * len(REQUESTS)) for token in CONTINUATION]

    together = np.concatenate(found, axis=1)
    for row, reference in enumerate(expected):
        assert difference(together[row], reference) < TOLERANCE
