"""Loading checkpoints: what works, what is refused and in which words, and that it stays local."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from treadle_core import Engine, Request, SamplingParams, collect, run
from treadle_core.errors import ModelLoadError, Unsupported
from treadle_core.layers import Window
from treadle_core.mlx_runtime.gguf import find_demo_model
from treadle_core.mlx_runtime.load import (
    KEPT_TOKENS,
    LoadedModel,
    ModelOptions,
    load,
    looks_like_path,
    model_name,
    read_config,
    read_json,
    resolve,
)
from treadle_core.mlx_runtime.open import open_engine
from treadle_core.testing import RecordingStore, zoo

from .test_gguf import write_gguf

PROMPT = tuple(b"A treadle keeps the loom moving")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("llama", tmp_path_factory.mktemp("zoo") / "tiny-llama")


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "tiny-llama"))


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content = {k: v for k, v in {**content, **changes}.items() if v is not None}
    path.write_text(json.dumps(content))


def edit_weights(folder: Path, change: Callable[[dict[str, mx.array]], Any]) -> None:
    path = str(folder / "model.safetensors")
    weights: Any = mx.load(path)
    change(weights)
    mx.save_safetensors(path, weights)


def test_a_directory_is_loaded_and_answers_like_the_model_that_was_saved(checkpoint: Path) -> None:
    loaded = load(ModelOptions(model=str(checkpoint)))

    events = run(
        Engine(loaded.runner, tokenizer=loaded.tokenizer),
        [Request(id="a", prompt=PROMPT, params=GREEDY)],
    )

    assert loaded.name == "tiny-llama"
    assert loaded.config["model_type"] == "llama"
    assert loaded.runner.spec.batched
    assert loaded.runner.spec.context_length == 4096
    assert collect(events)["a", 0].tokens == zoo.greedy(zoo.build("llama"), PROMPT, 8)


def test_an_engine_is_opened_with_a_budget_that_the_machine_has(checkpoint: Path) -> None:
    engine, loaded = open_engine(ModelOptions(model=str(checkpoint)), memory_utilization=0.5)

    events = run(engine, [Request(id="a", prompt="Hello", params=GREEDY)])

    assert isinstance(loaded, LoadedModel)
    assert engine.tokenizer is loaded.tokenizer
    assert collect(events)["a", 0].reason == "length"


def test_an_engine_is_opened_over_a_store_which_is_closed_with_it(checkpoint: Path) -> None:
    store = RecordingStore()
    engine, _ = open_engine(
        ModelOptions(model=str(checkpoint)), memory_utilization=0.5, make_store=lambda: store
    )

    run(engine, [Request(id="a", prompt=PROMPT, params=GREEDY)])
    found = collect(run(engine, [Request(id="b", prompt=PROMPT, params=GREEDY)]))["b", 0]

    assert found.usage is not None
    assert found.usage.cached_tokens == len(PROMPT) - 1
    assert not store.closed
    engine.close()
    assert store.closed


def test_a_store_is_closed_when_its_model_cannot_be_loaded() -> None:
    store = RecordingStore()
    with pytest.raises(ModelLoadError):
        open_engine(ModelOptions(model="/no/such/model"), make_store=lambda: store)
    assert store.closed


def test_a_bound_on_kept_tokens_reaches_the_layers(checkpoint: Path) -> None:
    loaded = load(ModelOptions(model=str(checkpoint), max_kv_size=64))

    kinds = {(type(layer), layer.size, layer.keep) for layer in loaded.runner.spec.layers}
    assert kinds == {(Window, 64, KEPT_TOKENS)}


def test_the_demo_model_is_what_is_loaded_without_a_name() -> None:
    demo = find_demo_model()
    if demo is None:
        pytest.skip("the demo package is not installed")

    assert resolve(None) == str(demo)
    assert resolve("other/model") == "other/model"


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda d: (d / "config.json").unlink(), id="no config"),
        pytest.param(lambda d: (d / "config.json").write_text("{nope"), id="broken config"),
        pytest.param(lambda d: (d / "config.json").write_text("[1]"), id="config of another kind"),
        pytest.param(lambda d: edit(d / "config.json", model_type="gpt9"), id="unknown type"),
        pytest.param(lambda d: edit(d / "config.json", model_type=None), id="no type"),
        pytest.param(lambda d: edit(d / "config.json", hidden_size=None), id="missing size"),
        pytest.param(lambda d: edit(d / "config.json", hidden_size="x"), id="size in letters"),
        pytest.param(lambda d: edit(d / "config.json", hidden_size=32), id="other size"),
        pytest.param(lambda d: edit(d / "config.json", rope_theta="x"), id="broken rope"),
        pytest.param(lambda d: edit(d / "config.json", model_file="own.py"), id="own code"),
        pytest.param(lambda d: (d / "model.safetensors").unlink(), id="no weights"),
        pytest.param(
            lambda d: (d / "model.safetensors").write_bytes(b"\0" * 100), id="broken weights"
        ),
        pytest.param(
            lambda d: (d / "model.safetensors").write_bytes(
                (d / "model.safetensors").read_bytes()[:-1000]
            ),
            id="truncated weights",
        ),
        pytest.param(
            lambda d: edit_weights(d, lambda w: [w.pop(key) for key in list(w)[:5]]),
            id="missing tensors",
        ),
        pytest.param(
            lambda d: edit_weights(d, lambda w: w.update({"lm_head.weight": mx.zeros((3, 3))})),
            id="tensor of another shape",
        ),
        pytest.param(lambda d: (d / "tokenizer.json").unlink(), id="no tokenizer"),
        pytest.param(lambda d: (d / "tokenizer.json").write_text("{nope"), id="broken tokenizer"),
        pytest.param(lambda d: [file.unlink() for file in d.iterdir()], id="empty folder"),
        pytest.param(lambda d: (shutil.rmtree(d), d.write_text("hi")), id="a file"),
    ],
)
def test_a_damaged_checkpoint_is_refused_with_one_line(
    checkpoint: Path, damage: Callable[[Path], Any]
) -> None:
    damage(checkpoint)

    with pytest.raises(ModelLoadError) as caught:
        load(ModelOptions(model=str(checkpoint)))

    message = caught.value.message
    assert message.startswith(f"cannot load {checkpoint}: ")
    assert "\n" not in message
    assert len(message.removeprefix(f"cannot load {checkpoint}: ")) > 10
    assert caught.value.code == "model_load_error"


def test_a_checkpoints_own_code_does_not_run_unless_it_is_allowed(checkpoint: Path) -> None:
    edit(checkpoint / "config.json", model_file="own.py")
    trace = checkpoint / "was here"
    (checkpoint / "own.py").write_text(
        f"from pathlib import Path\nPath({str(trace)!r}).touch()\n"
        "from mlx_lm.models.llama import Model, ModelArgs\n"
    )

    with pytest.raises(ModelLoadError, match="trust_remote_code"):
        load(ModelOptions(model=str(checkpoint)))
    assert not trace.exists()

    loaded = load(ModelOptions(model=str(checkpoint), trust_remote_code=True))
    assert trace.exists()
    assert loaded.runner.spec.batched


def test_adapters_that_are_not_there_are_refused(checkpoint: Path) -> None:
    options = ModelOptions(model=str(checkpoint), adapter_path=str(checkpoint / "nowhere"))

    with pytest.raises(ModelLoadError, match="nowhere"):
        load(options)


def test_adapters_are_refused_for_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="adapter_path cannot be honoured for a GGUF file"):
        load(ModelOptions(model=str(tmp_path / "model.gguf"), adapter_path="somewhere"))


def test_a_gguf_file_is_loaded_and_named_after_its_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.Q8_0.gguf")

    loaded = load(ModelOptions(model=str(path)))

    assert loaded.name == "tiny"
    assert loaded.runner.spec.batched
    assert loaded.runner.spec.context_length == 512
    assert loaded.tokenizer.end_tokens == {2}


def test_a_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(20))

    with pytest.raises(ModelLoadError, match=r"cannot load .*model\.gguf: .+"):
        load(ModelOptions(model=str(path)))


@pytest.mark.parametrize(
    "reference",
    ["/nowhere/model", "./nowhere", "~/nowhere", "a/b/c", "nowhere", "nowhere.gguf", "/x.gguf", ""],
)
def test_a_path_that_leads_nowhere_is_refused_without_asking_the_hub(reference: str) -> None:
    with pytest.raises(ModelLoadError, match=r"there is no such file|its name is empty"):
        load(ModelOptions(model=reference))


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("/a/b", True),
        ("./b", True),
        ("../b", True),
        ("~/b", True),
        ("b", True),
        ("a/b/c", True),
        ("org/name", False),
    ],
)
def test_what_can_only_be_a_path(reference: str, expected: bool) -> None:
    assert looks_like_path(reference) is expected


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("org/name", "org/name"),
        ("/models/SmolLM2-135M.Q8_0.gguf", "SmolLM2-135M"),
        ("model.gguf", "model"),
    ],
)
def test_the_name_for_clients(reference: str, expected: str) -> None:
    assert model_name(reference) == expected


def test_the_name_of_a_directory_is_its_last_part(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()

    assert model_name(f"{tmp_path}/tiny/") == "tiny"
    assert model_name(f"{tmp_path}/tiny/../tiny") == "tiny"


def test_a_json_file_of_a_checkpoint_is_read_without_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "half.json").write_text("{")

    assert read_json(str(tmp_path), "config.json") == {"model_type": "llama"}
    assert read_json(str(tmp_path), "generation_config.json") == {}
    assert read_json(str(tmp_path / "model.gguf"), "config.json") == {}
    assert read_json("/no/such/place", "config.json") == {}
    for name in ("list.json", "half.json"):
        with pytest.raises(ModelLoadError, match=name):
            read_json(str(tmp_path), name)


def test_a_config_is_read_or_what_keeps_it_from_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"it has no config\.json"):
        read_config(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    assert read_config(str(tmp_path)) == {"model_type": "llama"}
    assert read_config(str(tmp_path / "model.gguf")) == {}
    with pytest.raises(ModelLoadError, match="there is no such file or directory"):
        read_config("/no/such/place")
    with pytest.raises(ModelLoadError, match=r"there is no such file$"):
        read_config(str(tmp_path / "other.gguf"))


OFFLINE = """
import os, socket, sys
os.environ["HF_HUB_OFFLINE"] = "1"
def refuse(*args, **kwargs):
    raise SystemExit("a connection was attempted")
socket.socket.connect = socket.getaddrinfo = refuse
from treadle_core.errors import ModelLoadError
from treadle_core.mlx_runtime.load import ModelOptions, load, read_config
load(ModelOptions(model=sys.argv[1]))
absent = "treadle-tests/not-in-the-cache"
for read in (lambda: load(ModelOptions(model=absent)), lambda: read_config(absent)):
    try:
        read()
    except ModelLoadError as error:
        print(error)
"""


@pytest.mark.slow
def test_offline_a_directory_loads_and_a_repository_is_refused_without_a_connection(
    original: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(original)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    said = "cannot load treadle-tests/not-in-the-cache: it is not on this machine"
    assert [line.startswith(said) for line in lines] == [True, True]
