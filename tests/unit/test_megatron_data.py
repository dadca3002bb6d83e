"""Packing: what the model sees, which logits predict which tokens, and that columns keep their samples."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils.cp_utils import response_rows
from slime.backends.megatron_utils.data import Packing, pack
from slime.training.micro_batches import MicroBatches, to_tensors

CPU = torch.device("cpu")


def make_share(**columns):
    share = {
        "tokens": [[5, 6, 7], [8, 9], [1, 2, 3, 4]],
        "response_lengths": [2, 1, 2],
        "loss_masks": [[1, 0], [1], [1, 1]],
        "rewards": [1.0, -1.0, 0.5],
        "rollout_log_probs": [[-0.5, -1.0], [-2.0], [-0.25, -0.75]],
        "partition": [3, 0, 9],
        "micro_batch_indices": [[2, 0], [1]],
        "num_microbatches": [1, 1],
        "global_batch_sizes": [2, 1],
    }
    return to_tensors(share | columns, CPU)


def test_samples_lie_one_after_the_other_and_the_padding_is_a_sequence_of_its_own():
    packed = pack([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], Packing(multiple=4))
    assert packed["tokens"].tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert packed["packed_seq_params"].cu_seqlens_q.tolist() == [0, 3, 5, 8]
    assert packed["packed_seq_params"].cu_seqlens_q.dtype == torch.int32
    assert packed["packed_seq_params"].max_seqlen_q == 3
    exact = pack([torch.tensor([5, 6, 7, 8])], Packing(multiple=4))
    assert exact["packed_seq_params"].cu_seqlens_q.tolist() == [0, 4]


def test_row_p_predicts_the_token_at_p_plus_1():
    # tokens p p r | p r | p p r r: the responses are at 2 | 4 | 7 8
    assert response_rows([3, 2, 4], [1, 1, 2])[0].tolist() == [1, 3, 6, 7]
    assert response_rows([3, 2], [0, 1])[0].tolist() == [3]


def test_a_micro_batch_holds_its_samples_columns_and_targets():
    batch = next(iter(MicroBatches(make_share(), Packing()).of_step(None)))
    assert [t.tolist() for t in batch["unconcat_tokens"]] == [[1, 2, 3, 4], [5, 6, 7]]
    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch["response_tokens"].tolist() == [3, 4, 6, 7]
    assert batch["rewards"] == [0.5, 1.0]
    assert torch.cat(batch["rollout_log_probs"]).tolist() == [-0.25, -0.75, -0.5, -1.0]
    # on the rows that predict a trained token
    assert batch["full_loss_masks"].tolist() == [[0, 1, 1, 0, 1, 0, 0]]
    assert "partition" not in batch


def test_steps_take_their_micro_batches_in_order():
    micro_batches = MicroBatches(make_share(), Packing(multiple=8))
    assert micro_batches.num_steps == 2
    first, second = (next(iter(micro_batches.of_step(step))) for step in (0, 1))
    assert [len(b["unconcat_tokens"]) for b in (first, second)] == [2, 1]
    assert second["tokens"].tolist() == [[8, 9, 0, 0, 0, 0, 0, 0]]


def test_a_column_added_later_reaches_the_micro_batches():
    micro_batches = MicroBatches(make_share(), Packing())
    micro_batches.rollout_data["advantages"] = [torch.full((2,), 1.0), torch.full((1,), 2.0), torch.full((2,), 3.0)]
    micro_batches.rollout_data["not_per_sample"] = [1, 2]
    batch = next(iter(micro_batches.of_step(None)))
    assert torch.cat(batch["advantages"]).tolist() == [3.0, 3.0, 1.0, 1.0]
    assert "not_per_sample" not in batch


def test_results_go_back_to_the_order_of_the_share():
    micro_batches = MicroBatches(make_share(), Packing())
    values = [[torch.tensor(2.0), torch.tensor(0.0)], [torch.tensor(1.0)]]
    assert [v.item() for v in micro_batches.scatter(values)] == [0.0, 1.0, 2.0]


def test_wrong_lengths_and_missing_prompts_are_named():
    with pytest.raises(ValueError, match="sample 1 .* prompt of at least one token"):
        make_share(response_lengths=[2, 2, 2])
    with pytest.raises(ValueError, match=r"'loss_masks' .* from sample 1 on"):
        make_share(loss_masks=[[1, 0], [1, 1], [1, 1]])


def test_an_empty_response_is_packed_but_trains_nothing():
    share = make_share(
        response_lengths=[2, 0, 2], loss_masks=[[1, 0], [], [1, 1]], rollout_log_probs=[[0, 0], [], [0, 0]]
    )
    batch = list(MicroBatches(share, Packing()).of_step(None))[1]
    assert batch["response_tokens"].shape == (0,)
    assert batch["full_loss_masks"].sum() == 0


def test_predictions_stay_within_their_sample():
    """Samples of 2, 5 and 3 tokens with responses of 1, 3 and 2: a layer that looks 2 ahead embeds tokens 2 further
    on, and predicts a response token from the row 3 before it, where the sample has one."""
    samples = [torch.tensor(tokens) for tokens in ([1, 2], [3, 4, 5, 6, 7], [8, 9, 10])]
    data = {
        "tokens": samples,
        "response_lengths": [1, 3, 2],
        "loss_masks": [torch.ones(n, dtype=torch.int32) for n in (1, 3, 2)],
        "micro_batch_indices": [[0, 1, 2]],
        "num_microbatches": [1],
        "global_batch_sizes": [3],
    }
    (batch,) = MicroBatches(data, Packing(multiple=4, num_predictions=2)).of_step(None)
    assert [tokens.tolist() for tokens in batch["further_tokens"]] == [
        [[2, 0, 4, 5, 6, 7, 0, 9, 10, 0, 0, 0]],
        [[0, 0, 5, 6, 7, 0, 0, 10, 0, 0, 0, 0]],
    ]
    assert [rows.tolist() for rows in batch["prediction_rows"]] == [[2, 3, 4, 7], [2, 3]]
    assert [places.tolist() for places in batch["prediction_places"]] == [[1, 2, 3, 5], [2, 3]]
    assert [targets.tolist() for targets in batch["prediction_targets"]] == [[5, 6, 7, 10], [6, 7]]


@pytest.mark.parametrize("ahead", [1, 2])
def test_context_parallel_ranks_share_the_predicted_tokens(ahead):
    totals, responses = [2, 9, 30, 5], [1, 7, 11, 0]
    _, expected, _ = response_rows(totals, responses, ahead=ahead)
    tokens = [torch.arange(total) + 100 * i for i, total in enumerate(totals)]
    all_targets = torch.cat([sample[len(sample) - n :] for sample, n in zip(tokens, responses, strict=True)])
    found: list[int] = []
    for rank in range(2):
        packing = Packing(cp_rank=rank, cp_size=2)
        rows, places, _ = response_rows(totals, responses, cp_rank=rank, cp_size=2, ahead=ahead)
        assert torch.equal(pack(tokens, packing)["tokens"][0][rows], all_targets[places] - 1 - ahead)
        found += places.tolist()
    assert sorted(found) == expected.tolist()
