"""What a plan says is written where."""

from __future__ import annotations

from slime.plan.times import outputs
from tests.unit.plan_fakes import plan_args


def test_answers_of_evaluations_are_among_the_outputs_where_they_are_asked_for() -> None:
    assert "out/eval_samples.jsonl" in [output.where for output in outputs(plan_args(log_eval_samples=2), None)]
    assert "out/eval_samples.jsonl" not in [output.where for output in outputs(plan_args(), None)]


def test_what_is_sent_to_a_url_is_shown_there() -> None:
    args = plan_args(save="out/remote/s3/b/run", remote_urls={"save": "s3://b/run"})
    places = [output.where for output in outputs(args, None)]
    assert "s3://b/run/iter_<rollout id>/" in places and not [place for place in places if "/remote/" in place]
