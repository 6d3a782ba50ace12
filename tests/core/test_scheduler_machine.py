"""The scheduler under arbitrary requests, aborts, failures and steps, against what each request gets alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagemill.errors import PromptTooLongError
from pagemill.params import FinishReason
from tests.core.fakes import VOCAB, Engine, full, request, state_machine_settings, window

MAX_MODEL_LEN = 48
POOLS = [
    [full(14)],
    [full(9)],
    [full(100)],
    [full(12), window(12, size=6)],
    [full(100), window(4, size=6)],
    [window(8, size=9), full(9), window(6, size=3)],
]
PROMPTS = [[random.Random(seed).randrange(VOCAB) for _ in range(MAX_MODEL_LEN)] for seed in range(2)]

requests = st.fixed_dictionaries(
    {
        "prompt": st.builds(
            lambda text, length, tail: PROMPTS[text][:length] + tail,
            st.integers(0, 1),
            st.sampled_from([1, 3, 4, 5, 8, 9, 12, 16, 20, 31, 32]),
            st.sampled_from([[], [], [1], [2, 3], [3, 2, 1, 0]]),
        ),
        "max_tokens": st.sampled_from([0, 1, 2, 5, 12, 30]),
        "min_tokens": st.integers(0, 4),
        "priority": st.integers(0, 2),
        "salt": st.sampled_from([None, None, None, "s"]),
        "tenant": st.sampled_from(["", "", "s"]),
        "eos": st.sampled_from([(), (1, 2, 3), (7,)]),
        "stop_token_ids": st.sampled_from([(), (11, 12)]),
        "ignore_eos": st.booleans(),
        "prompt_logprobs": st.sampled_from([None, None, None, 1]),
        "seed": st.integers(0, 2),
        "poisoned": st.sampled_from([False] * 9 + [True]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """Every answer is compared with the same request's answer from a fresh engine of its own."""

    @initialize(
        specs=st.sampled_from(POOLS),
        caching=st.sampled_from([True, True, True, False]),
        budget=st.sampled_from([1, 3, 7, 16, 64]),
        threshold=st.sampled_from([0, 1, 5]),
        seats=st.integers(2, 6),
        policy=st.sampled_from(["fcfs", "priority"]),
        max_stall_s=st.sampled_from([0, 1e-6, 1.0, 20.0]),  # a step takes one second
    )
    def start(self, specs, caching, budget, threshold, seats, policy, max_stall_s):
        self.engine = Engine(
            specs,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            long_prefill_token_threshold=threshold,
            policy=policy,
            max_stall_s=max_stall_s,
            enable_prefix_caching=caching,
        )
        self.messages = {}
        self.gone: set[str] = set()

    @rule(fields=requests)
    def add(self, fields):
        self.send(fields)

    @precondition(lambda self: self.messages)
    @rule(fields=requests, data=st.data(), with_output=st.booleans())
    def add_one_that_goes_on_from_another(self, fields, data, with_output):
        request_id = data.draw(st.sampled_from(sorted(self.messages)))
        earlier = self.messages[request_id]
        prompt = earlier.prompt_token_ids + (self.engine.tokens[request_id] if with_output else [])
        prompt = prompt[: MAX_MODEL_LEN - 1]
        self.send({**fields, "prompt": prompt, "salt": earlier.cache_salt, "tenant": earlier.tenant})

    def send(self, fields):
        fields = {**fields, "min_tokens": min(fields["min_tokens"], fields["max_tokens"])}
        poisoned = fields.pop("poisoned")
        message = request(f"r{len(self.messages)}", **fields)
        most = self.engine.scheduler.kv.max_request_tokens
        try:
            self.engine.add(message)
        except PromptTooLongError:
            assert len(message.prompt_token_ids) > most
        else:
            assert len(message.prompt_token_ids) <= most
            self.messages[message.request_id] = message
            if poisoned:
                self.engine.worker.poisoned.add(message.request_id)

    @rule(times=st.integers(1, 8))
    def step(self, times):
        for _ in range(times):
            self.engine.step()

    @precondition(lambda self: len(self.messages) > 3)
    @rule(data=st.data(), while_computing=st.booleans())
    def abort(self, data, while_computing):
        request_id = data.draw(st.sampled_from(sorted(self.messages)))
        open_before = request_id not in self.engine.reasons and request_id not in self.gone

        def abort() -> None:
            assert self.engine.scheduler.abort(request_id) is open_before
            self.engine.scheduler.check_invariants()

        if while_computing and self.engine.scheduler.has_work:
            self.engine.step(between=abort)
        else:
            abort()
        if open_before:
            self.gone.add(request_id)

    @invariant()
    def holds(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check_invariants()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.run(limit=5_000)
        for request_id, message in self.messages.items():
            expected, reason = self.alone(message)
            got = engine.tokens[request_id]
            if request_id in self.gone:
                assert request_id not in engine.reasons
                assert got == expected[: len(got)]
            elif engine.reasons[request_id] is FinishReason.ERROR:
                assert request_id in engine.worker.poisoned
                assert got == expected[: len(got)]
            else:
                assert (got, engine.reasons[request_id]) == (expected, reason)
                sent = [c for output in engine.outputs[request_id] for c in output.new_prompt_logprobs or []]
                wanted = message.params.prompt_logprobs is not None
                assert [c[0][0] for c in sent] == (message.prompt_token_ids[1:] if wanted else [])

    def alone(self, message):
        specs = [spec for spec in self.engine.worker.specs if spec.kind == "full"]
        engine = Engine(specs, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False)
        engine.add(message)
        engine.run()
        return engine.tokens[message.request_id], engine.reasons[message.request_id]


class TestScheduler(SchedulerMachine.TestCase):
    settings = state_machine_settings(num_steps=2_000)


@pytest.mark.slow
class TestSchedulerForLong(SchedulerMachine.TestCase):
    settings: settings = state_machine_settings(num_steps=10_000)
