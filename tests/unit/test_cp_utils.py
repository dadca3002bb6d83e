"""The reduction of per-token values, independent of the split; and which tokens context-parallel ranks have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.algorithms.policy import correction_of
from slime.backends.megatron_utils.cp_utils import (
    all_gather_with_cp,
    gather_responses,
    get_logits_and_tokens_offset_with_cp,
    get_sum_of_sample_mean,
    key_chunks,
    response_rows,
    slice_log_prob_with_cp,
    slice_with_cp,
    zigzag_positions,
)
from slime.backends.megatron_utils.data import Packing, pack
from slime.backends.megatron_utils.layers.varlen_attention import attend_packed
from tests.unit.megatron_fakes import make_args, make_hf_model, run_world

LENGTHS = [3, 2, 1]
MASKS = [torch.tensor([1, 0, 1]), torch.tensor([1, 1]), torch.tensor([0])]
X = torch.tensor([1.0, 50.0, 3.0, 10.0, 20.0, 7.0])


def reducer(samples=slice(None), **options):
    totals = [length + 1 for length in LENGTHS[samples]]
    return get_sum_of_sample_mean(totals, LENGTHS[samples], MASKS[samples], **options)


def test_each_sample_counts_by_its_mean_over_trained_tokens():
    assert reducer()(X).item() == (1 + 3) / 2 + (10 + 20) / 2 + 0


def test_samples_of_one_rollout_share_a_denominator():
    assert reducer(sample_denoms=[4, 4, 0])(X).item() == (1 + 3 + 10 + 20) / 4


def test_per_token_is_the_plain_masked_sum():
    assert reducer(calculate_per_token_loss=True)(X).item() == 1 + 3 + 10 + 20


@pytest.mark.parametrize("options", [{}, {"calculate_per_token_loss": True}])
def test_the_sum_over_splits_is_the_sum(options):
    parts = reducer(slice(0, 1), **options)(X[:3]) + reducer(slice(1, 3), **options)(X[3:])
    assert parts.item() == reducer(**options)(X).item()


def test_a_masked_infinity_does_not_spread():
    x = X.clone()
    x[1], x[5] = float("inf"), float("nan")
    assert reducer()(x).item() == reducer()(X).item()


def test_gradients_are_the_weights():
    x = X.clone().requires_grad_()
    reducer()(x).backward()
    assert x.grad.tolist() == [0.5, 0.0, 0.5, 0.5, 0.5, 0.0]


def test_a_mask_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="a response of 2 tokens in a sample of 3 has a loss mask of 1"):
        get_sum_of_sample_mean([3], [2], [torch.ones(1)])


def test_the_two_chunks_of_a_rank_and_what_their_logits_predict():
    # 7 tokens, the last 4 a response, over 2 ranks: chunks of ceil(7 / 4) = 2; rank 0 has the chunks 0 and 3
    first, second = (get_logits_and_tokens_offset_with_cp(7, 4, cp_rank=rank, cp_size=2) for rank in (0, 1))
    assert first.chunks == ((0, 2), (6, 8))
    assert first.logits == first.tokens == ((0, 0), (0, 0))  # nothing follows token 6
    # rows 2 ... 5 predict the response, tokens 3 ... 6
    assert (second.logits, second.tokens) == (((2, 4), (4, 6)), ((3, 5), (5, 7)))


def test_a_slice_is_padded_and_zigzag():
    tokens = torch.arange(7)
    parts = [slice_with_cp(tokens, -1, cp_rank=rank, cp_size=2).tolist() for rank in (0, 1)]
    assert parts == [[0, 1, 6, -1], [2, 3, 4, 5]]
    assert slice_with_cp(tokens, -1, cp_rank=0, cp_size=1) is tokens


@given(total=st.integers(2, 60), share=st.floats(0, 1), cp_size=st.sampled_from([1, 2, 3, 4, 8]))
def test_every_response_token_is_predicted_on_one_rank(total, share, cp_size):
    response = min(int(share * total), total - 1)
    values = torch.arange(response)
    parts = [slice_log_prob_with_cp(values, total, response, cp_rank=rank, cp_size=cp_size) for rank in range(cp_size)]
    assert sorted(torch.cat(parts).tolist()) == values.tolist()
    places, tokens = [], torch.arange(total)
    for rank in range(cp_size):
        packing = Packing(cp_rank=rank, cp_size=cp_size)
        of_rank, predicted, counts = response_rows([total], [response], cp_rank=rank, cp_size=cp_size)
        packed = pack([tokens], packing)
        assert counts == [len(of_rank)]
        # the row holds the token before the one that it predicts, at its position
        held = packed["tokens"][0, of_rank]
        assert torch.equal(held, predicted + total - response - 1)
        assert torch.equal(packed["position_ids"][0, of_rank], held)
        places.append(predicted)
    assert sorted(torch.cat(places).tolist()) == list(range(response))


def test_a_list_of_values_is_sliced_as_a_tensor_is():
    part = slice_log_prob_with_cp([10.0, 11.0, 12.0, 13.0], 7, 4, cp_rank=1, cp_size=2)
    assert part == [10.0, 11.0, 12.0, 13.0]
    with pytest.raises(ValueError, match="a response of 4 tokens has 3 values"):
        slice_log_prob_with_cp([1.0, 2.0, 3.0], 7, 4, cp_rank=0, cp_size=2)


def test_positions_are_those_of_the_whole_sequences():
    cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert zigzag_positions(cu_seqlens, 6, cp_rank=0, cp_size=2).tolist() == [0, 1, 6, 7, 0, 3]
    assert zigzag_positions(cu_seqlens, 6, cp_rank=1, cp_size=2).tolist() == [2, 3, 4, 5, 1, 2]
    # and without ranks, with an empty sequence between
    assert zigzag_positions(torch.tensor([0, 3, 3, 5]), 5, cp_rank=0, cp_size=1).tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_chunks_of_queries_attend_to_the_gathered_keys_as_the_whole_sequences_do(cp_size, window):
    generator = torch.Generator().manual_seed(0)
    lengths = [2 * cp_size * n for n in (3, 1, 3, 2)]
    query, key, value = (torch.randn(sum(lengths), heads, 8, generator=generator) for heads in (4, 2, 2))
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    how = {"scale": 0.3, "window": window}
    expected = attend_packed(query, key, value, ends, **how)

    def of_rank(x: torch.Tensor, rank: int) -> torch.Tensor:
        return torch.cat([slice_with_cp(part, 0, cp_rank=rank, cp_size=cp_size) for part in x.split(lengths)])

    keys, values = (torch.cat([of_rank(x, rank) for rank in range(cp_size)]) for x in (key, value))
    for rank in range(cp_size):
        seen = key_chunks(ends, cp_rank=rank, cp_size=cp_size)
        ours = attend_packed(
            of_rank(query, rank), keys[seen.rows], values[seen.rows], seen.cu_queries, cu_keys=seen.cu_keys, **how
        )
        torch.testing.assert_close(ours, of_rank(expected, rank), atol=1e-6, rtol=1e-5)


def check_gathering(args):
    from megatron.core import parallel_state

    rank, group = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_group()
    whole = torch.arange(5.0) * 10
    mine = slice_log_prob_with_cp(whole, 9, 5).clone().requires_grad_()
    gathered = all_gather_with_cp(mine, 9, 5)
    assert gathered.tolist() == whole.tolist()
    (gathered * torch.arange(1.0, 6)).sum().backward()  # the same loss on every rank
    own = slice_log_prob_with_cp(torch.arange(1.0, 6), 9, 5)
    assert mine.grad.tolist() == own.tolist(), "the gradient of the own values, not summed over ranks"
    assert all_gather_with_cp(whole, 9, 5).tolist() == whole.tolist(), "a whole column stays as it is"
    assert slice_log_prob_with_cp(own, 9, 5) is own, "a part stays as it is"
    check_reducer(rank)
    check_tis(args)
    assert gather_responses(torch.ones(1), torch.tensor([rank]), group.size(), group).tolist() == [1.0] * group.size()


def check_reducer(rank):
    """A part gives the value and the gradient that the whole gives."""
    totals, responses = [9, 11], [5, 7]
    reduce = get_sum_of_sample_mean(totals, responses, [torch.ones(5), torch.tensor([1.0, 0, 1, 1, 0, 1, 1])])
    whole = torch.arange(12.0).requires_grad_()
    expected = reduce(whole)
    expected.backward()
    parts = zip(whole.detach().split(responses), whole.grad.split(responses), totals, responses, strict=True)
    cut = [
        [slice_log_prob_with_cp(column, total, response) for column in (values, grad)]
        for values, grad, total, response in parts
    ]
    mine = torch.cat([values for values, _ in cut]).requires_grad_()
    found = reduce(mine)
    found.backward()
    assert found.item() == pytest.approx(expected.item())
    torch.testing.assert_close(mine.grad, torch.cat([grad for _, grad in cut]))
    with pytest.raises(ValueError, match="13 values for responses of 12 tokens, of which this rank has"):
        reduce(torch.zeros(13))
    # A prompt of 1 and a response of 1: all of it is one rank's, and no rank waits for another.
    reduce = get_sum_of_sample_mean([2], [1], [torch.ones(1)])
    assert reduce(slice_log_prob_with_cp(torch.ones(1), 2, 1)).item() == float(rank == 0)


def gather_weigh_and_cut(
    args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths
):
    """A sequence-level correction as it is written where columns are a rank's part."""
    weights = []
    for train, rollout, mask, *lengths in zip(
        train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, strict=True
    ):
        gap = all_gather_with_cp(train, *lengths) - all_gather_with_cp(rollout, *lengths)
        weights.append(slice_log_prob_with_cp((gap * mask).sum().exp().expand(len(mask)), *lengths))
    weights = torch.cat(weights)
    return pg_loss * weights, loss_masks, {"weights": weights}


def check_tis(args):
    columns = {"total_lengths": [9, 11], "response_lengths": [5, 7], "loss_masks": [torch.ones(5), torch.ones(7)]}
    train, rollout = [torch.full((n,), -0.5) for n in (5, 7)], [torch.full((n,), -0.6) for n in (5, 7)]
    args.custom_tis_function_path, args.use_tis = f"{__file__}:gather_weigh_and_cut", True
    loss, masks, metrics = correction_of(args)(columns | {"rollout_log_probs": rollout}, torch.ones(12), train)
    expected = torch.tensor([0.5, 0.7]).exp().repeat_interleave(torch.tensor([5, 7]))
    torch.testing.assert_close(loss, expected)
    assert len(metrics["weights"]) == 12 and masks is columns["loss_masks"]


@pytest.mark.processes
def test_ranks_put_their_parts_of_a_response_together(tmp_path):
    make_hf_model(tmp_path)
    run_world(2, check_gathering, make_args(tmp_path, "--context-parallel-size 2", actor_num_gpus_per_node=2))
