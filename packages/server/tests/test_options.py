"""Options: flags and file keys become settings, all of them, and nothing else is taken."""

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from treadle_core import InvalidRequest, TreadleError, Unsupported
from treadle_server.cli import main, make_parser, with_positional
from treadle_server.options import (
    RUN_OPTIONS,
    SERVE_OPTIONS,
    Option,
    from_file,
    from_flags,
    run_config,
    serve_config,
)
from treadle_server.settings import RunConfig, ServeConfig

REFERENCE_FLAGS = (
    "model served-model-name host port max-num-seqs max-queue max-num-batched-tokens "
    "prefill-step-size chunked-prefill-tokens max-decode-stall-ms policy max-kv-size kv-memory-mb "
    "gpu-memory-utilization context-length adapter-path trust-remote-code offline stream-interval "
    "max-tokens max-request-tokens default-temperature default-top-p default-top-k default-min-p "
    "default-presence-penalty default-repetition-penalty timeout api-key max-body-bytes "
    "stall-seconds log-level disable-prefix-cache cache-memory-mb cache-memory-percent "
    "kv-cache-quantization kv-cache-quantization-bits kv-cache-quantization-group-size "
    "kv-cache-min-quantize-tokens paged-cache-block-size ssd-cache-dir ssd-cache-max-gb "
    "warm-prompts mllm max-video-frames default-video-fps"
).split()

OWN_FLAGS = {
    "default-chat-template-kwargs",
    "ageing-seconds",
    "checkpoint-interval",
    "cache-save",
    "kv-bits",
    "kv-group-size",
    "speculative-method",
    "num-speculative-tokens",
    "draft-model",
    "mtp-head",
    "speculative-lossy",
    "text-only",
    "max-media-items",
    "max-image-bytes",
    "max-video-bytes",
    "max-audio-bytes",
    "max-media-bytes",
    "max-decoded-media-bytes",
    "max-media-side",
    "max-image-pixels",
    "max-frame-pixels",
    "max-video-pixels",
    "max-video-seconds",
    "max-audio-seconds",
    "media-fetch-seconds",
    "media-decode-seconds",
    "max-media-redirects",
    "max-concurrent-media",
    "max-loaded-media-bytes",
    "vision-cache-mb",
    "disable-media-fetch",
    "allow-http-media",
    "allowed-media-domains",
    "allowed-media-ports",
    "allowed-media-networks",
    "allowed-local-media-path",
}

# What else has to be said for a flag to mean something.
NEEDED = {
    "ageing_seconds": ["--policy", "priority"],
    "kv_group_size": ["--kv-bits", "4"],
    "kv_cache_quantization_bits": ["--kv-cache-quantization"],
    "kv_cache_quantization_group_size": ["--kv-cache-quantization"],
    "kv_cache_min_quantize_tokens": ["--kv-cache-quantization"],
    "ssd_cache_max_gb": ["--ssd-cache-dir", "d"],
    "num_speculative_tokens": ["--speculative-method", "ngram"],
    "speculative_lossy": ["--speculative-method", "ngram"],
    "draft_model": ["--speculative-method", "draft-model", "--draft-model", "another"],
    "mtp_head": ["--speculative-method", "mtp"],
}

# One of each pair excludes the other, so that not all fit into one file.
LEFT_OUT = (
    "gpu_memory_utilization",
    "max_decode_stall_ms",
    "disable_prefix_cache",
    "cache_memory_percent",
    "max_kv_size",
    "draft_model",
    "mtp_head",
    "text_only",
    "disable_media_fetch",
)

VALUES: dict[str, Any] = {
    "adapter_path": "adapters",
    "allowed_local_media_path": ("/a", "/b"),
    "allowed_media_domains": ("a.example", ".b.example"),
    "allowed_media_networks": ("10.1.0.0/16", "fd00::/8"),
    "allowed_media_ports": (8080, 8443),
    "audio": ("a.wav",),
    "image": ("a.png", "b.png"),
    "video": ("a.mp4", "b.mp4"),
    "api_key": "k",
    "chunked_prefill_tokens": 64,
    "default_chat_template_kwargs": {"a": [1]},
    "host": "0.0.0.0",
    "kv_bits": 4,
    "kv_group_size": 32,
    "log_level": "debug",
    "model": "m",
    "policy": "priority",
    "served_model_name": ("a", "b"),
    "speculative_method": "ngram",
    "system": "s",
    "stop": ("a", "b"),
    "gpu_memory_utilization": 0.5,
    "cache_memory_percent": 0.5,
    "kv_cache_quantization_bits": 4,
    "kv_cache_quantization_group_size": 32,
    "ssd_cache_dir": "d",
    "cache_save": "f",
    "draft_model": "small",
    "mtp_head": "head",
    "warm_prompts": "w",
    "max_num_batched_tokens": 9000,
    "default_presence_penalty": 1.5,
    "default_top_p": 0.5,
    "default_min_p": 0.5,
    "top_p": 0.5,
}


def value_of(option: Option) -> Any:
    """A legal value that is not the default."""
    return VALUES.get(option.field, True if option.metavar is None else 3)


def spelled(option: Option) -> list[str]:
    """The flag with that value."""
    value = value_of(option)
    if option.metavar is None:
        return [option.flag]
    if option.metavar == "JSON":
        return [option.flag, msgspec.json.encode(value).decode()]
    values = value if isinstance(value, tuple) else [value]
    return [word for each in values for word in (option.flag, str(each))]


def serve_of(*words: str) -> ServeConfig:
    given = vars(make_parser().parse_args(["serve", *words]))
    return serve_config(from_flags(with_positional(given), SERVE_OPTIONS))


def found_in(config: Any, option: Option) -> Any:
    """The option's field, wherever it is in the settings."""
    owner = next(part for part in msgspec.structs.astuple(config) if isinstance(part, option.owner))
    return getattr(owner, option.field)


def test_the_flags_of_the_reference_are_all_there() -> None:
    flags = {option.flag.removeprefix("--") for option in SERVE_OPTIONS}
    assert set(REFERENCE_FLAGS) <= flags
    assert flags - set(REFERENCE_FLAGS) == OWN_FLAGS


ALIASED = [
    (["--enable-mtp"], ["--speculative-method", "mtp"]),
    (
        ["--enable-mtp", "--mtp-num-draft-tokens", "3"],
        ["--speculative-method", "mtp", "--num-speculative-tokens", "3"],
    ),
    (["--enable-mtp", "--mtp-optimistic"], ["--speculative-method", "mtp", "--speculative-lossy"]),
    (
        ["--enable-mtp", "--mtp-head", "h", "--speculative-method", "mtp"],
        ["--speculative-method", "mtp", "--mtp-head", "h"],
    ),
]


@pytest.mark.parametrize(("words", "ours"), ALIASED)
def test_the_references_names_of_speculation_mean_ours(words: list[str], ours: list[str]) -> None:
    assert serve_of(*words) == serve_of(*ours)
    given = vars(make_parser().parse_args(["run", "hi", *words]))
    assert (
        run_config(from_flags(given, RUN_OPTIONS), "hi").speculative == serve_of(*ours).speculative
    )


def test_a_file_may_use_the_references_names(tmp_path: Path) -> None:
    path = tmp_path / "treadle.toml"
    path.write_text("enable-mtp = true\nmtp_num_draft_tokens = 2\nmtp-optimistic = false")
    values = from_file(path, SERVE_OPTIONS)
    speculative = serve_config(values).speculative
    assert (speculative.speculative_method, speculative.num_speculative_tokens) == ("mtp", 2)
    assert not speculative.speculative_lossy
    flags = vars(make_parser().parse_args(["serve", "--num-speculative-tokens", "4"]))
    both = serve_config(values | from_flags(flags, SERVE_OPTIONS)).speculative
    assert both.num_speculative_tokens == 4


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("enable-mtp = 'yes'", "enable-mtp: got 'yes', expected true or false"),
        ("mtp_num_draft_tokens = '2'", "mtp_num_draft_tokens: got '2', expected `int"),
        ("enable-mtp = true\nenable_mtp = true", "enable_mtp"),
        ("enable-mtp = true\nspeculative-method = 'ngram'", "say different things"),
        ("specprefill = true", "specprefill: no prompt is computed in part"),
    ],
)
def test_a_file_with_a_wrong_name_of_the_reference_is_refused(
    tmp_path: Path, content: str, says: str
) -> None:
    path = tmp_path / "treadle.toml"
    path.write_text(content)
    with pytest.raises(TreadleError, match=says):
        from_file(path, SERVE_OPTIONS)


@pytest.mark.parametrize("command", [["serve"], ["run", "hi"]])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--enable-mtp", "--speculative-method", "ngram"],
            "enable_mtp and speculative_method ngram say different things",
        ),
        (
            ["--speculative-method", "ngram", "--mtp-num-draft-tokens", "3"],
            "mtp_num_draft_tokens means nothing unless speculative_method is mtp",
        ),
        (["--mtp-num-draft-tokens", "3"], "num_speculative_tokens means nothing unless"),
        (["--mtp-optimistic"], "mtp_optimistic means nothing unless speculative_method is mtp"),
        (["--enable-mtp", "--mtp-num-draft-tokens", "0"], "num_speculative_tokens: got 0"),
        (["--enable-mtp", "--mtp-num-draft-tokens", "x"], "--mtp-num-draft-tokens: got 'x'"),
        (["--mllm-draft-model", "m"], "mllm_draft_model: no assistant of mlx-vlm is run"),
        (["--mllm-draft-kind", "mtp"], "speculative_method"),
        (["--mllm-draft-block-size", "4"], "num_speculative_tokens is how many"),
        (["--default-mllm-draft"], "speculative_method holds for all requests"),
        (["--specprefill"], "specprefill: no prompt is computed in part"),
        (["--specprefill-threshold", "9"], "chunked_prefill_tokens"),
        (["--specprefill-keep-pct", "0.3"], "no prompt is computed in part"),
        (["--specprefill-backbone-pct", "0"], "no prompt is computed in part"),
        (["--specprefill-draft-model", "m"], "no prompt is computed in part"),
    ],
)
def test_what_the_reference_means_otherwise_is_one_sentence_and_status_2(
    capsys: pytest.CaptureFixture[str], command: list[str], words: list[str], says: str
) -> None:
    assert main([*command, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert (err[:9], err.count("\n")) == ("treadle: ", 1)
    assert says in err


@pytest.mark.parametrize("option", SERVE_OPTIONS, ids=lambda option: option.field)
def test_every_flag_of_serve_changes_its_setting_alone(option: Option) -> None:
    needed = NEEDED.get(option.field, [])
    config, plain = serve_of(*needed, *spelled(option)), serve_of(*needed)
    assert found_in(config, option) == value_of(option)
    assert found_in(config, option) != found_in(plain, option)
    for other in SERVE_OPTIONS:
        if other is not option:
            assert found_in(config, other) == found_in(plain, other)


@pytest.mark.parametrize("option", RUN_OPTIONS, ids=lambda option: option.field)
def test_every_flag_of_run_changes_its_setting(option: Option) -> None:
    words = [*NEEDED.get(option.field, []), *spelled(option)]
    given = vars(make_parser().parse_args(["run", "hi", *words]))
    config = run_config(from_flags(given, RUN_OPTIONS), "hi")
    assert found_in(config, option) == value_of(option)
    assert found_in(config, option) != found_in(RunConfig(), option)
    assert config.run.prompt == "hi"


@pytest.mark.parametrize("dashes", [True, False])
def test_a_file_says_everything_that_flags_say(tmp_path: Path, dashes: bool) -> None:
    lines: list[str] = []
    for option in SERVE_OPTIONS:
        if option.field in LEFT_OUT:
            continue
        key = option.field.replace("_", "-") if dashes else option.field
        value = value_of(option)
        if isinstance(value, dict):
            value = "{a = [1]}"
        elif isinstance(value, tuple):
            value = str(list(value))
        else:
            value = msgspec.json.encode(value).decode()
        lines.append(f"{key} = {value}")
    path = tmp_path / "treadle.toml"
    path.write_text("\n".join(lines))
    config = serve_config(from_file(path, SERVE_OPTIONS))
    for option in SERVE_OPTIONS:
        if option.field not in LEFT_OUT:
            assert found_in(config, option) == value_of(option), option.field


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("prot = 80", "prot"),
        ("port = '80'", "port"),
        ("port = 80.5", "port"),
        ("[engine]\nmax_queue = 3", "engine"),
        ("port = 80\nPort = 81", "Port"),
        ("max_queue = 3\nmax-queue = 4", "max-queue"),
        ("port = ", "treadle.toml"),
        ("offline = 1", "offline"),
    ],
)
def test_a_file_with_something_else_is_refused(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "treadle.toml"
    path.write_text(content)
    with pytest.raises(TreadleError, match=says):
        from_file(path, SERVE_OPTIONS)


def test_a_file_that_is_not_there_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"nothing\.toml"):
        from_file(tmp_path / "nothing.toml", SERVE_OPTIONS)


def test_flags_win_over_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "treadle.toml"
    path.write_text("port = 80\nhost = '0.0.0.0'\nserved-model-name = 'one'\nmax-queue = 0")
    flags = vars(make_parser().parse_args(["serve", "--port", "81", "--max-queue", "5"]))
    values = from_file(path, SERVE_OPTIONS) | from_flags(flags, SERVE_OPTIONS)
    config = serve_config(values)
    assert (config.http.port, config.http.host) == (81, "0.0.0.0")
    assert config.http.served_model_name == ("one",)
    assert config.engine.max_queue == 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--port", "abc"], "--port: got 'abc', expected `int`"),
        (["--port", "70000"], "port: got 70000, expected an integer from 0 to 65535"),
        (["--max-num-seqs", "0"], "max_num_seqs: got 0"),
        (["--default-temperature", "nan"], "default_temperature: got nan"),
        (["--default-top-p", "0"], "default_top_p: got 0"),
        (["--log-level", "loud"], "--log-level: got 'loud'"),
        (["--policy", "lottery"], "policy: got 'lottery', expected fcfs or priority"),
        (["--default-chat-template-kwargs", "{"], "--default-chat-template-kwargs"),
        (["--default-chat-template-kwargs", "[]"], "--default-chat-template-kwargs"),
        (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization: got 1.5"),
        (["--kv-memory-mb", "5", "--gpu-memory-utilization", "0.5"], "exclude each other"),
        (["--ageing-seconds", "5"], "ageing_seconds means nothing unless policy is priority"),
        (["--kv-group-size", "32"], "kv_group_size means nothing unless kv_bits is 4 or 8"),
        (["--kv-bits", "6"], "kv_bits: got 6, expected 4 or 8"),
        (["--kv-bits", "4", "--kv-group-size", "16"], "kv_group_size: got 16, expected 32 or 64"),
        (["--kv-bits", "8", "--max-kv-size", "512"], "max_kv_size and kv_bits exclude each other"),
        (
            ["--chunked-prefill-tokens", "5", "--max-decode-stall-ms", "5"],
            "exclude each other",
        ),
        (["--max-num-seqs", "9000"], "must exceed max_num_seqs"),
        (["--disable-prefix-cache", "--ssd-cache-dir", "d"], "exclude each other"),
        (["--disable-prefix-cache", "--cache-memory-mb", "5"], "exclude each other"),
        (
            ["--disable-prefix-cache", "--cache-memory-mb", "0"],
            "cache_memory_mb exclude each other",
        ),
        (["--disable-prefix-cache", "--warm-prompts", "f"], "exclude each other"),
        (["--disable-prefix-cache", "--checkpoint-interval", "64"], "exclude each other"),
        (["--cache-memory-mb", "5", "--cache-memory-percent", "0.5"], "exclude each other"),
        (["--cache-memory-mb", "0"], "keeps nothing unless ssd_cache_dir is given"),
        (["--cache-memory-mb", "-1"], "cache_memory_mb: got -1"),
        (["--cache-memory-percent", "20"], "cache_memory_percent: got 20.0"),
        (["--kv-cache-quantization-bits", "4"], "means nothing without kv_cache_quantization"),
        (["--kv-cache-min-quantize-tokens", "4"], "means nothing without kv_cache_quantization"),
        (["--kv-cache-quantization", "--kv-cache-quantization-bits", "2"], "expected 8 or 4"),
        (["--paged-cache-block-size", "0"], "paged_cache_block_size: got 0"),
        (["--ssd-cache-max-gb", "4"], "ssd_cache_max_gb means nothing without ssd_cache_dir"),
        (["--ssd-cache-dir", "d", "--ssd-cache-max-gb", "0"], "ssd_cache_max_gb: got 0"),
        (["--ssd-cache-dir", ""], "ssd_cache_dir: got '', expected a path"),
        (["--checkpoint-interval", "0"], "checkpoint_interval: got 0"),
        (["--text-only", "--max-media-items", "3"], "text_only and max_media_items exclude"),
        (["--text-only", "--mllm"], "text_only and mllm exclude each other"),
        (["--disable-media-fetch", "--allow-http-media"], "exclude each other"),
        (["--disable-media-fetch", "--max-media-redirects", "0"], "exclude each other"),
        (["--text-only", "--vision-cache-mb", "0"], "text_only and vision_cache_mb exclude"),
        (["--disable-media-fetch", "--allowed-media-domains", "a.b"], "exclude each other"),
        (["--vision-cache-mb", "-1"], "vision_cache_mb: got -1"),
        (["--max-image-bytes", "many"], "--max-image-bytes: got 'many', expected `int"),
        (["--allowed-media-ports", "https"], "--allowed-media-ports"),
        (["--timeout", "-1"], "timeout: got -1"),
        (["--api-key", ""], "api_key"),
        (["--served-model-name", ""], "served_model_name"),
        (["--model", ""], "model"),
        (["one", "--model", "two"], "two models"),
    ],
)
def test_a_wrong_value_is_one_sentence_and_status_2(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(["serve", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("treadle: ")
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--enable-prefix-cache"],
        ["serve", "--continuous-batching"],
        ["serve", "--max-num-seq", "3"],
        ["serve", "one", "two"],
        ["serve", "--port"],
        ["run"],
        ["run", "hi", "--port", "80"],
        ["bench"],
        ["bench", "luck"],
        ["fly"],
        [],
    ],
)
def test_unknown_flags_and_commands_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_model_may_stand_alone_or_be_said_twice_alike() -> None:
    assert serve_of("m").model.model == "m"
    assert serve_of("--model", "m").model.model == "m"
    assert serve_of("m", "--model", "m").model.model == "m"
    assert serve_of().model.model is None


def test_help_shows_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    for name, options in (("serve", SERVE_OPTIONS), ("run", RUN_OPTIONS)):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert all(option.flag in text for option in options)
        assert "--enable-mtp as --speculative-method mtp" in text
        assert "specprefill" not in text
        assert "(2048)" in text


def test_zero_is_said_too() -> None:
    words = ["--ssd-cache-dir", "d", "--cache-memory-mb", "0", "--kv-cache-quantization"]
    cache = serve_of(*words, "--kv-cache-min-quantize-tokens", "0").cache
    assert cache.said == (
        "cache_memory_mb",
        "kv_cache_quantization",
        "kv_cache_min_quantize_tokens",
        "ssd_cache_dir",
    )
    assert serve_of().cache.said == ()


def test_run_refuses_a_system_message_with_raw_text() -> None:
    with pytest.raises(Unsupported, match="raw"):
        run_config({"raw": True, "system": "s"}, "hi")


@pytest.mark.parametrize("other", [{"raw": True}, {"text_only": True}])
def test_run_refuses_media_where_none_would_be_seen(other: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="image"):
        run_config({"image": ("a.png",), **other}, "hi")


def test_run_is_greedy_unless_told_otherwise() -> None:
    assert run_config({}, "hi").run.temperature == 0.0


def test_a_flag_for_another_struct_is_not_lost() -> None:
    parsed = argparse.Namespace(top_k="4")
    assert from_flags(vars(parsed), RUN_OPTIONS) == {"top_k": 4}


def test_bad_types_are_told_by_flag() -> None:
    with pytest.raises(InvalidRequest, match=r"--top-k"):
        from_flags({"top_k": "many"}, RUN_OPTIONS)
