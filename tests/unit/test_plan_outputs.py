"""What a plan says is written where."""

from __future__ import annotations

from slime.plan.times import outputs
from tests.unit.plan_fakes import plan_args


def test_answers_of_evaluations_are_among_the_outputs_where_they_are_asked_for() -> None:
    assert "out/eval_samples.jsonl" in [output.where for output in outputs(plan_args(log_eval_samples=2), None)]
    assert "out/eval_samples.jsonl" not in [output.where for output in outputs(plan_args(), None)]
