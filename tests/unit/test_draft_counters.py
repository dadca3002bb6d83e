"""How many drafted tokens an engine accepted: from SGLang's own counters to the metrics of a rollout."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from slime.backends.sglang_utils import cpu_standins
from slime.observability.rollout_metrics import draft_metrics
from slime.utils.types import Sample

DRAFTED = 3
ARGS = Namespace(sglang_speculative_algorithm="EAGLE")


def answer(accepted: list[int], *, tokens: int) -> dict[str, Any]:
    """The `meta_info` that SGLang's own code writes after verifications that accepted so many drafted tokens each.

    Its scheduler and its server run no model here; the classes that count are real, so that a new name or a new
    meaning of a counter in another version of SGLang shows.
    """
    cpu_standins.install()
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    request: Any = SimpleNamespace(spec_correct_drafts_histogram=[])
    for count in accepted:
        Req.update_spec_correct_drafts_histogram(request, count)
    sent = SimpleNamespace(
        spec_verify_ct=[len(accepted)],
        spec_num_correct_drafts=[sum(accepted)],
        completion_tokens=[tokens],
        spec_correct_drafts_histogram=[request.spec_correct_drafts_histogram],
    )
    server: Any = SimpleNamespace(server_args=SimpleNamespace(speculative_num_draft_tokens=DRAFTED + 1))
    meta: dict[str, Any] = {"finish_reason": {"type": "stop"}, "completion_tokens": tokens}
    TokenizerManager._calculate_spec_decoding_metrics(server, meta, sent, 0)
    return meta


def sample_of(accepted: list[int], *, tokens: int | None = None) -> Sample:
    sample = Sample()
    given = 1 + sum(accepted) + len(accepted)  # one of the prompt, and one more a verification
    sample.append_response_tokens(ARGS, meta_info=answer(accepted, tokens=given if tokens is None else tokens))
    return sample


def test_acceptance_is_pooled_over_the_rollout_per_depth() -> None:
    first, second = [0, 1, 1, 3], [3, 2]
    metrics = draft_metrics([sample_of(first), sample_of(second), Sample()])
    all_of_them = first + second
    assert metrics == pytest.approx(
        {
            "spec_accept_rate": sum(all_of_them) / (DRAFTED * len(all_of_them)),
            "spec_accept_length": 1 + sum(all_of_them) / len(all_of_them),
            **{f"spec_accept_rate_pos_{k}": sum(n >= k for n in all_of_them) / len(all_of_them) for k in (1, 2, 3)},
        }
    )


def test_tokens_that_no_verification_gave_do_not_lengthen_what_is_accepted() -> None:
    """A short response whose drafts are all refused gains nothing, though it has more tokens than verifications."""
    sample = sample_of([0, 0])
    assert sample.spec_info.spec_accept_length == 3 / 2
    assert draft_metrics([sample]) == {"spec_accept_rate": 0.0, "spec_accept_length": 1.0}


def test_a_rollout_without_drafts_has_no_such_metrics() -> None:
    assert draft_metrics([sample_of([]), Sample()]) == {}
