"""Texts for the demo model's head, out of Python's own standard library.

    python examples/mtp_demo_texts.py texts.jsonl
    treadle mtp fit --data texts.jsonl --out head --generate 96 --generate-tokens 96

Pages of the language reference to learn from as they are, and questions about functions for the
model to answer. The same Python gives the same texts.
"""

import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

MOST_CHARACTERS = 180_000
NUM_QUESTIONS = 120
LONGEST_EXTRACT = 500
SEED = 0
QUESTIONS = (
    "What does `{name}` do in Python?",
    "Explain in simple words:\n\n{text}",
    "Summarise in one sentence:\n\n{text}",
    "Show me how to use `{name}`.",
)


def main(out: str) -> None:
    """Write the texts, a JSON object per line."""
    rng = random.Random(SEED)
    lines = [{"text": page} for page in pages(rng)] + list(questions(rng))
    Path(out).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def pages(rng: random.Random) -> Iterator[str]:
    """Pages of the language reference, in a random order, as many as there is room for."""
    names = sorted(topics)
    rng.shuffle(names)
    room = MOST_CHARACTERS
    for name in names:
        if len(topics[name]) <= room:
            room -= len(topics[name])
            yield topics[name]


def questions(rng: random.Random) -> Iterator[dict[str, object]]:
    """Chats of one question, for the model to answer."""
    for name, text in rng.sample(sorted(docstrings()), NUM_QUESTIONS):
        content = rng.choice(QUESTIONS).format(name=name, text=text[:LONGEST_EXTRACT])
        yield {"messages": [{"role": "user", "content": content}]}


def docstrings() -> Iterator[tuple[str, str]]:
    """Names of the standard library's public functions and classes, with what is said of them."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                text = ast.get_docstring(node)
                if text and len(text) > 80:
                    yield f"{path.stem}.{node.name}", text


if __name__ == "__main__":
    main(*sys.argv[1:])
