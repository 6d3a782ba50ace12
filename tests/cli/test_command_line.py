"""The command line's conventions: instant help, one-line errors, exit codes, flags from the config."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagemill.cli import VERBS, main
from pagemill.cli.arguments import Parser, UsageError, add_config_flags, config_from
from pagemill.config import EngineConfig, ServerConfig, flags, human_int
from pagemill.errors import ConfigError


def parse(*words: str) -> tuple[EngineConfig, ServerConfig]:
    parser = Parser(prog="pagemill test")
    add_config_flags(parser, EngineConfig)
    add_config_flags(parser, ServerConfig)
    args = parser.parse_args(list(words))
    return config_from(args, EngineConfig), config_from(args, ServerConfig)


def test_no_words_print_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(verb.name in shown and verb.summary in shown for verb in VERBS)


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("pagemill ")


def test_an_unknown_verb_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sreve"]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "'sreve'" in shown
    assert "serve" in shown


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["serve", "--port", "x"], "not a whole number"),
        (["serve", "--port", "70000"], "65535"),
        (["serve", "--dtype", "int3"], "bfloat16"),
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["serve", "--max-num-seqs", "0"], "max-num-seqs"),
        (["bench", "latency", "--repetitions", "0"], "0 is too small; the least is 1"),
        (["bench", "serve", "--repetitions", "-3"], "the least is 1"),
        (["bench", "throughput", "--work", "w1,w9"], "'w9' is no workload"),
        (["bench", "serve", "--work", "w4:0"], "the rate must be a number above 0"),
        (["bench", "serve", "--work", "w4:fast"], "the rate must be a number above 0"),
        (["bench", "latency", "--max-model-length", "3"], "did you mean --max-model-len"),
        (["generate", "/no/such/model", "-i", "/dev/null"], "no model"),
        (
            ["generate", "-i", "/dev/null", "--tokenizer", "/nonexist"],
            "--tokenizer='/nonexist': no such folder or file",
        ),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert part in shown


def test_every_field_is_a_flag_and_no_flag_means_its_default() -> None:
    engine, server = parse()
    assert engine == EngineConfig()
    assert server == ServerConfig()


def test_flags_reach_their_fields() -> None:
    engine, server = parse(
        "some/folder",
        "--max-model-len",
        "4K",
        "--no-enable-prefix-caching",
        "--api-key",
        "a",
        "--api-key",
        "b",
        "--port",
        "0",
    )
    assert engine.model == "some/folder"
    assert engine.max_model_len == 4096
    assert engine.enable_prefix_caching is False
    assert server.api_key == ("a", "b")
    assert server.port == 0


def test_model_may_be_a_flag() -> None:
    engine, _ = parse("--model", "some.gguf")
    assert engine.model == "some.gguf"


def test_a_flag_takes_one_value_and_never_the_model() -> None:
    for flag in ("--api-key", "--allowed-methods", "--allowed-headers", "--allowed-origins"):
        value = "http://a.org" if flag == "--allowed-origins" else "x"
        engine, server = parse(flag, value, "some/folder")
        assert engine.model == "some/folder"
        assert getattr(server, flag[2:].replace("-", "_")) == (value,)
    with pytest.raises(UsageError, match="unrecognized arguments: some/folder"):
        parse("--api-key", "a", "b", "some/folder")


def test_lists_read_as_in_vllm_too() -> None:
    _, server = parse("--allowed-origins", '["http://a.org", "https://b.org:8443"]', "--allowed-methods", '["GET"]')
    assert server.allowed_origins == ("http://a.org", "https://b.org:8443")
    assert server.allowed_methods == ("GET",)
    assert parse("--allowed-origins", '["*"]')[1].allowed_origins == ("*",)
    assert parse("--api-key", '["k"]')[1].api_key == ('["k"]',), "a key is taken as it is"
    with pytest.raises(UsageError, match="no JSON list"):
        parse("--allowed-origins", "[*]")


@pytest.mark.parametrize(
    "origin", ["example.org", "http://a.org/", "http://", "localhost:3000", "*.a.org", "http://a.org/x"]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"--allowed-origins=.* must be \* or scheme://host"):
        parse("--allowed-origins", origin)


def test_two_models_are_an_error() -> None:
    with pytest.raises(UsageError, match="name two models"):
        parse("some/folder", "--model", "/nonexist")
    assert parse("some/folder", "--model", "some/folder")[0].model == "some/folder"


def test_vllms_other_names_are_read() -> None:
    assert parse("--dtype", "half")[0].dtype == "float16"
    assert parse("--dtype", "float")[0].dtype == "float32"
    assert parse("--enable-log-requests", "--disable-log-requests")[1].enable_log_requests is False


def test_a_config_reads_numbers_as_the_flags_do() -> None:
    assert EngineConfig(max_model_len="4k").max_model_len == 4000  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--max-model-len='4x' is not a whole number"):
        EngineConfig(max_model_len="4x")  # type: ignore[arg-type]


def test_a_mistyped_flag_is_answered_with_the_close_ones() -> None:
    with pytest.raises(UsageError, match=r"unrecognized arguments: --max-model-length=5; did you mean --max-model-len"):
        parse("--max-model-length=5")


def test_a_value_out_of_bounds_names_the_flag_and_the_limit() -> None:
    with pytest.raises(ConfigError, match=r"--block-size.*256"):
        parse("--block-size", "999")


def test_flags_are_never_abbreviated() -> None:
    with pytest.raises(UsageError):
        parse("--max-num-s", "3")


@pytest.mark.parametrize(
    ("text", "value"), [("7", 7), ("4k", 4000), ("4K", 4096), ("1.5G", 3 << 29), ("2m", 2_000_000)]
)
def test_human_sizes_read_as_in_vllm(text: str, value: int) -> None:
    assert human_int(text) == value


def test_help_shows_each_fields_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for flag in [*flags(EngineConfig), *flags(ServerConfig)]:
        assert "--" + flag.name.replace("_", "-") in shown
        assert " ".join(flag.help.split())[:24] in shown


def test_bench_serve_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "pagemill.bench.client", raising=False)
    monkeypatch.delattr("pagemill.bench.client", raising=False)
    assert main(["bench", "serve"]) == 2
    assert "pip install 'pagemill[bench]'" in capsys.readouterr().err


def test_help_imports_neither_torch_nor_http() -> None:
    code = (
        "import sys; from pagemill.cli import main; main(['--help']);"
        "print([m for m in ('torch', 'fastapi', 'pydantic', 'numpy') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip().endswith("[]")
