"""Whatever the core plans, each request gets the tokens that its own context gives."""

import numpy as np
import pytest
import torch

from pagemill.core.messages import BlockCopy
from pagemill.worker import model_runner
from tests.worker.fake import VOCAB, Driver, continuation, next_token

PROMPT = [5, 17, 2, 9, 30, 41, 8, 8, 60, 3, 12]


@pytest.mark.parametrize("chunk", [1, 2, 4, 7, 64])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_chunks_do_not_change_the_output(chunk: int, num_groups: int) -> None:
    driver = Driver(num_groups=num_groups)
    driver.add("a", PROMPT)
    while len(driver.output("a")) < 20:
        driver.step({"a": min(chunk, driver.remaining("a"))})
    assert driver.output("a") == continuation(PROMPT, 20)


def test_no_token_before_the_prompt_is_wholly_computed() -> None:
    driver = Driver()
    driver.add("a", PROMPT)
    assert driver.step({"a": len(PROMPT) - 1}).token_ids == [[]]
    assert driver.step({"a": 1}).token_ids == [[next_token(PROMPT)]]


def test_requests_come_go_change_places_and_are_preempted() -> None:
    rng = np.random.default_rng(1)
    driver = Driver(block_size=3, num_blocks=100, seed=2)
    prompts = {f"r{i}": rng.integers(0, VOCAB, rng.integers(1, 20)).tolist() for i in range(30)}
    waiting, done = list(prompts), 0
    while done < len(prompts):
        while waiting and len(driver.tokens) < 8:
            driver.add(waiting[-1], prompts[waiting.pop()])
        names = [name for name in rng.permutation(list(driver.tokens)).tolist() if rng.random() < 0.8]
        if not names:
            continue
        driver.step({name: int(rng.integers(1, driver.remaining(name) + 1)) for name in names})
        for name in names:
            if len(driver.output(name)) >= 15:
                assert driver.output(name) == continuation(prompts[name], len(driver.output(name)))
                driver.finish(name)
                done += 1
            elif rng.random() < 0.1 and name not in driver.new:
                driver.preempt(name)
    assert len(driver.runner.batch) <= 8


def test_a_copied_block_serves_in_place_of_its_source() -> None:
    driver = Driver(block_size=4, num_blocks=64)
    driver.add("a", PROMPT)
    driver.step({"a": len(PROMPT)})
    source, target = driver.blocks["a"][0][0], driver.free[0].pop()
    driver.backend.copy_blocks([])
    plan_row = driver.runner.batch.row_of("a")
    driver.runner.batch.block_tables[0][plan_row, 0] = target
    driver.step({"a": 1}, copies=[BlockCopy(0, source, target)])
    assert driver.output("a") == continuation(PROMPT, 2)


def test_a_non_finite_row_is_named_and_the_others_go_on() -> None:
    driver = Driver()
    driver.backend.poisoned = {77}
    driver.add("good", PROMPT)
    driver.add("bad", [1, 77])
    result = driver.step({"bad": 2, "good": len(PROMPT)})
    assert result.non_finite == ["bad"]
    assert result.token_ids == [[], [next_token(PROMPT)]]


def test_a_row_that_allows_no_token_is_named_and_the_others_go_on() -> None:
    driver = Driver()
    driver.add("good", PROMPT)
    driver.add("stuck", [1, 7], allowed_token_ids=[VOCAB + 1])
    result = driver.step({"stuck": 2, "good": len(PROMPT)})
    assert (result.nothing_allowed, result.non_finite) == (["stuck"], [])
    assert result.token_ids == [[], [next_token(PROMPT)]]


def test_a_poisoned_prompt_position_fails_a_request_that_asked_for_its_logprobs() -> None:
    driver = Driver()
    driver.backend.poisoned = {77}
    driver.add("bad", [1, 77, 4], prompt_logprobs=0)
    result = driver.step({"bad": 3})
    assert result.non_finite == ["bad"]
    assert result.token_ids == [[]]


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("at_once", [2, 256])
def test_prompt_logprobs_cover_every_token_but_the_first(
    chunk: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "MAX_PROMPT_LOGITS", at_once)
    driver = Driver()
    driver.add("a", PROMPT, prompt_logprobs=1, logprobs=0)
    driver.add("b", PROMPT[::-1])
    found, logprobs = [], None
    while not driver.output("a"):
        counts = {name: min(chunk, driver.remaining(name)) for name in ("b", "a")}
        result = driver.step(counts)
        found += result.prompt_logprobs.get("a", [])
        logprobs = result.logprobs
    assert [entry[0][0] for entry in found] == PROMPT[1:]
    best = [next_token(PROMPT[:i]) for i in range(1, len(PROMPT))]
    assert [entry[1][0] for entry in found] == best
    total = torch.zeros(VOCAB)
    total[0] = 4.0
    expected = torch.log_softmax(total, -1)
    for entry, token in zip(found, best, strict=True):
        assert entry[1][1:] == (pytest.approx(float(expected[0])), 1)
        if entry[0][0] != token:
            assert entry[0][1] == pytest.approx(float(expected[1]))
    assert logprobs is not None
    assert logprobs[0] is None
    assert [entry[0][0] for entry in logprobs[1]] == driver.output("a")
    assert driver.output("b") == continuation(PROMPT[::-1], len(driver.output("b")))


def test_a_long_prompt_with_logprobs_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "MAX_PROMPT_LOGITS", 4)
    driver = Driver()
    driver.add("a", PROMPT, prompt_logprobs=0)
    driver.add("b", PROMPT)
    driver.step({"a": 11, "b": 11})
    assert driver.backend.batches == [[4, 11], [4], [3]]
    assert driver.output("a") == driver.output("b") == continuation(PROMPT, 1)


def test_rows_of_every_part_get_their_best_token_though_no_logits_of_theirs_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last part holds a prompt's last token alone, or a row that another prompt left no room for."""
    monkeypatch.setattr(model_runner, "MAX_PROMPT_LOGITS", 4)
    driver = Driver()
    driver.add("a", PROMPT[:5], prompt_logprobs=0)
    driver.add("b", PROMPT[:2])
    driver.step({"a": 5, "b": 2})
    assert driver.backend.batches == [[4, 2], [1]]
    assert driver.output("a") == continuation(PROMPT[:5], 1)
    assert driver.output("b") == continuation(PROMPT[:2], 1)
    driver.add("c", PROMPT[:4], prompt_logprobs=0)
    driver.step({"c": 4, "a": 1})
    assert driver.backend.batches[2:] == [[4], [1]]
    assert driver.output("a") == continuation(PROMPT[:5], 2)
    assert driver.output("c") == continuation(PROMPT[:4], 1)


def test_a_grammars_mask_follows_the_plan_though_only_some_rows_sample() -> None:
    driver = Driver()
    driver.add("a", PROMPT)
    driver.add("b", PROMPT)
    mask = np.full((2, 4), -1, np.int32)
    mask[1] = 0
    mask[1, 2] = 1  # token 64
    result = driver.step({"a": 3, "b": len(PROMPT)}, mask=mask)
    assert result.token_ids == [[], [64]]


def test_warming_up_leaves_no_trace() -> None:
    driver = Driver()
    driver.runner.warm_up()
    driver.add("a", PROMPT)
    driver.step({"a": len(PROMPT)})
    assert driver.output("a") == continuation(PROMPT, 1)


def test_tokens_go_to_their_requests_when_parts_end_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "MAX_PROMPT_LOGITS", 4)
    driver = Driver()
    prompts = {"a": PROMPT, "b": PROMPT[:5], "c": PROMPT[:2]}
    for name, prompt in prompts.items():
        driver.add(name, prompt, prompt_logprobs=0 if name == "a" else None, logprobs=0)
    driver.step({"a": 11, "b": 5, "c": 2})
    for name, prompt in prompts.items():
        assert driver.output(name) == continuation(prompt, 1)
