"""``pagemill generate``: every line is answered once, bad ones as errors, and stopped work goes on where it stopped."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from pagemill.cli import main
from pagemill.cli.generate import AnswerFile
from pagemill.errors import ConfigError
from tests.models.tiny import tiny_llama

PROMPT = {"prompt": "the fox", "temperature": 0, "max_tokens": 4, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


def generate(model: Path, lines: list[Any], folder: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the verb on these lines; its exit code and the whole output file."""
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    files = ["-i", str(source), "-o", str(target)]
    engine = ["--dtype", "float32", "--num-threads", "1", "--num-gpu-blocks-override", "64"]
    code = main(["generate", str(model), *files, *engine, *words])
    return code, [json.loads(line) for line in target.read_text().splitlines()] if target.exists() else []


def test_the_three_forms_are_answered_in_openais_shapes(model: Path, tmp_path: Path) -> None:
    batch = {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    code, answers = generate(model, [PROMPT, {**CHAT, "custom_id": "a", "n": 2}, "", batch], tmp_path)
    assert code == 0
    by_line = {answer["line"]: answer for answer in answers}
    assert sorted(by_line) == [1, 2, 4]
    assert by_line[1]["object"] == "text_completion"
    assert by_line[1]["choices"][0]["finish_reason"] == "length"
    assert by_line[1]["usage"]["completion_tokens"] == 4
    assert by_line[2]["custom_id"] == "a"
    assert [choice["index"] for choice in by_line[2]["choices"]] == [0, 1]
    body = by_line[4]["response"]["body"]
    assert by_line[4]["error"] is None
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": by_line[2]["choices"][0]["message"]["content"],
    }


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}])
def test_openais_own_types_read_the_answers(model: Path, tmp_path: Path, logprobs: dict[str, Any]) -> None:
    batch = {"custom_id": "b", "url": "/v1/chat/completions", "body": {**CHAT, **logprobs, "model": str(model)}}
    columns = {"logprobs": logprobs.get("top_logprobs", 0)} if logprobs else {}
    _, answers = generate(model, [{**PROMPT, **columns}, {**CHAT, **logprobs}, batch], tmp_path)
    by_line = {answer["line"]: answer for answer in answers}
    text = Completion.model_validate(by_line[1], strict=True).choices[0]
    chats = [ChatCompletion.model_validate(each) for each in (by_line[2], by_line[3]["response"]["body"])]
    assert len({chat.id for chat in chats}) == 2
    for chat in chats:
        found = chat.choices[0].logprobs
        assert (found is not None) == bool(logprobs)
        if found is not None:
            assert found.content is not None
            assert "".join(each.token for each in found.content) == chat.choices[0].message.content
            assert [len(each.top_logprobs) for each in found.content] == [logprobs.get("top_logprobs", 0)] * 4
    assert (text.logprobs is not None) == bool(logprobs)
    if text.logprobs is not None:
        assert text.logprobs.tokens is not None
        assert "".join(text.logprobs.tokens) == text.text


def test_the_http_apis_constraints_hold_beside_a_prompt(model: Path, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    free = {"temperature": 0, "max_tokens": 60}
    lines = [
        {"prompt": "the fox", **free, "guided_choice": ["dog", "cat"]},
        {"prompt": "the fox", **free, "structured_outputs": {"regex": "[0-9]{3}"}},
        {"messages": CHAT["messages"], **free, "response_format": wanted, "tool_choice": "auto"},
        {"body": {"messages": CHAT["messages"], **free, "response_format": wanted, "parallel_tool_calls": True}},
    ]
    code, answers = generate(model, lines, tmp_path)
    assert code == 0, answers
    by_line = {answer["line"]: answer for answer in answers}
    assert by_line[1]["choices"][0]["text"] in {"dog", "cat"}
    assert by_line[2]["choices"][0]["text"].isdigit()
    for body in (by_line[3], by_line[4]["response"]["body"]):
        assert json.loads(body["choices"][0]["message"]["content"]) in ({"a": 1}, {"a": 2})


def test_what_a_line_cannot_have_is_said_in_few_words(model: Path, tmp_path: Path) -> None:
    lines = [
        ({**PROMPT, "best_of": 3}, "best_of is for servers only"),
        ({**CHAT, "tool_choice": "required"}, "tool_choice is for servers only"),
        ({**PROMPT, "temprature": 1}, "did you mean temperature"),
        ({**PROMPT, "model": "gpt-4o"}, "'gpt-4o' is not the one that runs"),
        ({**CHAT, "response_format": {"type": "yaml"}}, "response_format"),
        ({**CHAT, "response_format": {"type": "json_object"}, "guided_regex": "a"}, "exclude each other"),
    ]
    code, answers = generate(model, [line for line, _ in lines], tmp_path)
    assert code == 1
    messages = {answer["line"]: answer["error"]["message"] for answer in answers}
    for number, (_, part) in enumerate(lines, start=1):
        assert part in messages[number]
        assert len(messages[number]) < 200


def test_bad_lines_become_errors_and_the_others_are_answered(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = [
        "{not json",
        "[1]",
        {"prompt": "x", "messages": []},
        {"prompt": [["nested"]]},
        {**PROMPT, "no_such_parameter": 1},
        {**PROMPT, "temperature": -1},
        {"prompt": ""},
        {"prompt": [7] * 500},
        {"custom_id": "c", "url": "/v1/embeddings", "body": {"input": "x"}},
    ]
    code, answers = generate(model, [*bad, PROMPT], tmp_path)
    assert code == 1
    assert len(answers) == 10
    failed = {answer["line"]: answer["error"]["message"] for answer in answers if answer.get("error")}
    assert sorted(failed) == list(range(1, 10))
    assert "no_such_parameter" in failed[5]
    assert "500 tokens" in failed[8]
    assert "9 failed" in capsys.readouterr().err


def test_stopped_work_goes_on_where_it_stopped(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{**PROMPT, "custom_id": f"id-{index}", "prompt": [5 + index, 6]} for index in range(5)]
    _, whole = generate(model, lines, tmp_path)
    kept = [answer for answer in whole if answer["custom_id"] in {"id-1", "id-3"}]
    half = json.dumps(whole[0])[:20]
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in kept) + half)
    _, resumed = generate(model, lines, tmp_path)
    assert "2 answers are there already" in capsys.readouterr().err
    assert resumed[:2] == kept
    texts = {answer["custom_id"]: answer["choices"] for answer in resumed}
    assert len(resumed) == 5
    assert texts == {answer["custom_id"]: answer["choices"] for answer in whole}


def test_restart_begins_again(model: Path, tmp_path: Path) -> None:
    generate(model, [PROMPT], tmp_path)
    _, answers = generate(model, [PROMPT, PROMPT], tmp_path, "--restart")
    assert [answer["line"] for answer in answers] in ([1, 2], [2, 1])


def test_an_id_that_is_used_twice_is_an_error(model: Path, tmp_path: Path) -> None:
    code, answers = generate(model, [{**PROMPT, "custom_id": "x"}] * 2, tmp_path)
    assert code == 1
    assert ["used by line 1 already" in answer.get("error", {}).get("message", "") for answer in answers].count(True)


def test_flags_are_defaults_that_a_line_may_override(model: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "the fox", "ignore_eos": True}, {"prompt": "the fox", "max_tokens": 2, "ignore_eos": True}]
    _, answers = generate(model, lines, tmp_path, "--max-tokens", "3", "--temperature", "0")
    assert sorted(answer["usage"]["completion_tokens"] for answer in answers) == [2, 3]


def test_a_file_that_is_no_answer_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\nline 2\n")
    for restart in (False, True):
        with pytest.raises(ConfigError, match="no answer of this verb; name another file") as refused:
            AnswerFile.open(str(path), restart=restart)
        assert "--restart" not in str(refused.value)
    assert path.read_text() == "my notes\nline 2\n"


@pytest.mark.parametrize("restart", [[], ["--restart"]])
@pytest.mark.parametrize("name", ["same", "link", "hard link"])
def test_the_input_is_never_the_output(
    name: str, restart: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text(json.dumps(PROMPT) + "\n")
    other = source if name == "same" else tmp_path / "other.jsonl"
    if name == "link":
        other.symlink_to(source)
    elif name == "hard link":
        other.hardlink_to(source)
    assert main(["generate", "-i", str(source), "-o", str(other), *restart]) == 2
    assert "are the same file" in capsys.readouterr().err
    assert json.loads(source.read_text()) == PROMPT


def test_an_input_that_is_piped_in_is_not_the_output_either(tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text(json.dumps(PROMPT) + "\n")
    command = [sys.executable, "-m", "pagemill", "generate", "-o", str(source), "--restart"]
    with source.open("rb") as stdin:
        done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, check=False)
    assert (done.returncode, source.read_text()) == (2, json.dumps(PROMPT) + "\n")


def test_errors_are_tried_again_and_the_file_ends_with_one_line_for_each_request(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[Any] = [PROMPT, {**PROMPT, "temperature": -1}, {**PROMPT, "custom_id": "c", "top_p": 9}]
    code, first = generate(model, lines, tmp_path)
    assert code == 1
    code, again = generate(model, lines, tmp_path)
    assert code == 1, "a request without an answer must not pass for one that has it"
    assert "1 answers are there already, 2 errors are tried again" in capsys.readouterr().err
    assert sorted(answer["line"] for answer in again) == [1, 2, 3]
    assert again[0] == next(answer for answer in first if answer["line"] == 1)
    code, mended = generate(model, [PROMPT, PROMPT, {**PROMPT, "custom_id": "c"}], tmp_path)
    assert code == 0
    assert sorted(answer["line"] for answer in mended) == [1, 2, 3]
    assert not any("error" in answer for answer in mended)
    assert "2 answered, 0 failed" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_the_error_of_an_id_used_twice_does_not_stand_for_the_answer(model: Path, tmp_path: Path) -> None:
    twice = [{**PROMPT, "custom_id": "x"}] * 2
    _, answers = generate(model, twice, tmp_path)
    (error,) = (answer for answer in answers if "error" in answer)
    (tmp_path / "out.jsonl").write_text(json.dumps(error) + "\n")  # stopped before the first line was answered
    _, resumed = generate(model, twice, tmp_path)
    assert sorted((answer["line"], "error" in answer) for answer in resumed) == [(1, False), (2, True)]


def test_a_long_answer_gives_signs_of_life_where_there_is_no_terminal(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pagemill.cli.generate.TELL_S", 0.001)
    generate(model, [{**PROMPT, "max_tokens": 100}], tmp_path)
    told = [line for line in capsys.readouterr().err.splitlines() if line.endswith("so far")]
    assert "0 answered, 0 failed" in told[0]


@pytest.mark.parametrize("words", [["-i", "/no/such/file"], ["-i", "/dev/null", "-o", "/no/such/folder/out"]])
def test_files_that_cannot_be_opened_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_answers_go_to_standard_output_by_default(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(json.dumps(PROMPT).encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["generate", str(model), "--dtype", "float32", "--num-gpu-blocks-override", "64"]) == 0
    (line,) = capfdbinary.readouterr().out.splitlines()
    assert json.loads(line)["line"] == 1
