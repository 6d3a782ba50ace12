"""Policies: a new one is a class, also when its order changes while requests wait."""

from __future__ import annotations

from pagemill.core.policy import FirstComeFirstServed
from tests.core.fakes import Engine, full, request


class LeastServedTenant(FirstComeFirstServed):
    """Fair share in its simplest form: the tenant that got the fewest tokens goes next."""

    dynamic = True

    def __init__(self, served: dict[str, int]) -> None:
        self.served = served

    def order(self, request, now_s):
        return (self.served[request.tenant], request.sequence)


class Deadline(FirstComeFirstServed):
    """Earliest deadline first."""

    def order(self, request, now_s):
        return (request.deadline_s, request.sequence)


def first_rows(engine: Engine) -> list[str]:
    return [row.request_id for plan in engine.plans for row in plan.new_rows]


def test_a_dynamic_order_is_asked_for_again_before_each_step():
    served = {"a": 0, "b": 0}
    engine = Engine([full(32)], policy=LeastServedTenant(served), max_num_seqs=1)
    names = ["a1", "a2", "a3", "b1", "b2"]
    engine.add(*(request(name, [1, 2, 3], max_tokens=3, tenant=name[0]) for name in names))
    while (plan := engine.step()) is not None:
        for request_id, count in zip(plan.request_ids, plan.num_new_tokens, strict=True):
            served[request_id[0]] += count
    assert first_rows(engine) == ["a1", "b1", "a2", "b2", "a3"]


def test_any_key_of_a_request_can_order_the_queue():
    engine = Engine([full(32)], policy=Deadline(), max_num_seqs=1)
    for name, deadline_s in (("late", 9.0), ("soon", 1.0), ("mid", 5.0)):
        message = request(name, [1, 2, 3])
        message.deadline_s = deadline_s
        engine.add(message)
    engine.run()
    assert first_rows(engine) == ["soon", "mid", "late"]
