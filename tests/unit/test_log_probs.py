"""Vocab-parallel log-probabilities and entropy against torch's softmax, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slime.algorithms.log_probs import calculate_log_probs_and_entropy

ROWS, VOCAB = 7, 12


def make_inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, VOCAB, generator=generator)
    return logits.to(dtype), torch.randint(0, 10, (ROWS,), generator=generator)


def reference(logits, tokens, *, temperature=1.0, vocab_size=VOCAB, with_entropy=True):
    """Log-probabilities, entropy and the gradient of a weighted sum of both, by autograd through log_softmax."""
    x = logits.double().requires_grad_()
    log_p = torch.log_softmax(x[:, :vocab_size] / temperature, dim=-1)
    picked, entropy = log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    weights = torch.arange(1.0, ROWS + 1)
    ((picked * weights).sum() + with_entropy * (entropy * weights.flip(0)).sum()).backward()
    return picked.detach().float(), entropy.detach().float(), x.grad.float()


def ours(logits, tokens, **options):
    x = logits.clone().requires_grad_()
    log_probs, entropy = calculate_log_probs_and_entropy(x, tokens, options.pop("tp_group", None), True, **options)
    weights = torch.arange(1.0, ROWS + 1)
    loss = (log_probs * weights).sum()
    if options.get("with_entropy_grad", True):
        loss = loss + (entropy * weights.flip(0)).sum()
    loss.backward()
    assert torch.equal(x, logits), "the logits are only read"
    return log_probs.detach(), entropy.detach(), x.grad


@pytest.mark.parametrize("chunk_size", [-1, 1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab_size", [VOCAB, 10])
def test_values_and_gradients_equal_log_softmax(chunk_size: int, temperature: float, vocab_size: int):
    logits, tokens = make_inputs()
    want = reference(logits, tokens, temperature=temperature, vocab_size=vocab_size)
    got = ours(logits, tokens, temperature=temperature, vocab_size=vocab_size, chunk_size=chunk_size)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


def test_chunks_change_no_bit():
    logits, tokens = make_inputs()
    for a, b in zip(ours(logits, tokens), ours(logits, tokens, chunk_size=2), strict=True):
        assert torch.equal(a, b)


def test_an_entropy_without_gradient_leaves_only_that_of_the_log_probs():
    logits, tokens = make_inputs()
    grad = ours(logits, tokens, with_entropy_grad=False)[2]
    torch.testing.assert_close(grad, reference(logits, tokens, with_entropy=False)[2], rtol=1e-5, atol=2e-6)
    _, entropy = calculate_log_probs_and_entropy(logits.requires_grad_(), tokens, None, True, with_entropy_grad=False)
    assert not entropy.requires_grad


def test_large_logits_do_not_overflow_and_no_rows_are_fine():
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    log_probs, entropy = calculate_log_probs_and_entropy(logits, torch.tensor([0]), None, True)
    assert log_probs.item() == 0.0
    assert entropy.item() == 0.0
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.isfinite(logits.grad).all()
    empty, _ = calculate_log_probs_and_entropy(torch.empty(0, 3), torch.empty(0, dtype=torch.long), None)
    assert empty.shape == (0,)


def test_bfloat16_logits_are_worked_on_in_float32():
    logits, tokens = make_inputs(torch.bfloat16)
    log_probs, entropy, grad = ours(logits, tokens)
    want = reference(logits, tokens)
    torch.testing.assert_close(log_probs, want[0], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(entropy, want[1], rtol=1e-5, atol=2e-6)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad.float(), want[2], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("chunk_size", [-1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_picked_inside_give_what_rows_gathered_before_give(chunk_size: int, dtype: torch.dtype):
    logits, tokens = make_inputs(dtype)
    rows = torch.tensor([5, 1, 2, 6])
    weights = torch.arange(1.0, 5)

    def train(x: torch.Tensor, picked: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        options = {"chunk_size": chunk_size, "temperature": 0.7, "vocab_size": 10, "rows": picked}
        log_probs, entropy = calculate_log_probs_and_entropy(x, tokens[rows], None, True, **options)
        ((log_probs + entropy) * weights).sum().backward()
        return log_probs, entropy

    inside, before = logits.clone().requires_grad_(), logits[rows].requires_grad_()
    for a, b in zip(train(inside, rows), train(before, None), strict=True):
        assert torch.equal(a, b)
    expected = torch.zeros_like(logits)
    expected[rows] = before.grad
    assert torch.equal(inside.grad, expected) and torch.equal(inside, logits)


def split_vocabulary(rank: int, world_size: int, store_path: str) -> None:
    torch.set_num_threads(1)  # the fork has no thread pool
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=world_size)
    for vocab_size in (VOCAB, 10, 6):  # 6: the second of two ranks holds padding only
        logits, tokens = make_inputs()
        tokens = tokens % vocab_size
        want = reference(logits, tokens, vocab_size=vocab_size, temperature=0.9)
        width = VOCAB // world_size
        columns = slice(rank * width, (rank + 1) * width)
        options = {"vocab_size": vocab_size, "temperature": 0.9, "chunk_size": 3, "tp_group": dist.group.WORLD}
        log_probs, entropy, grad = ours(logits[:, columns].contiguous(), tokens, **options)
        torch.testing.assert_close(log_probs, want[0], rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(entropy, want[1], rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(grad, want[2][:, columns], rtol=1e-5, atol=2e-6)
    dist.destroy_process_group()


@pytest.mark.processes
def test_a_vocabulary_split_over_two_ranks_gives_the_same(tmp_path):
    mp.start_processes(split_vocabulary, args=(2, str(tmp_path / "store")), nprocs=2, start_method="fork")


# ---- a cut distribution


def nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """What SGLang's PyTorch sampler keeps: all but tokens before which, by falling probability, lies more than p."""
    p = torch.softmax(logits.double(), dim=-1)
    falling, order = p.sort(dim=-1, descending=True)
    kept = falling.cumsum(-1) - falling <= top_p
    return torch.zeros_like(kept).scatter(1, order, kept)


def cut_reference(logits, tokens, kept, *, temperature=1.0, with_entropy=True):
    """Log-probabilities under the masked softmax, entropy of the whole one, and the gradient of both by autograd."""
    x = logits.double().clone().requires_grad_()
    kept = kept.scatter(1, tokens[:, None], True)
    log_q = torch.log_softmax((x / temperature).masked_fill(~kept, float("-inf")), dim=-1)
    log_p = torch.log_softmax(x / temperature, dim=-1)
    picked, entropy = log_q.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    weights = torch.arange(1.0, ROWS + 1)
    ((picked * weights).sum() + with_entropy * (entropy * weights.flip(0)).sum()).backward()
    return picked.detach().float(), entropy.detach().float(), x.grad.float(), kept.sum(-1)


@pytest.mark.parametrize("top_p", [0.05, 0.8, 0.999])
@pytest.mark.parametrize(("chunk_size", "with_entropy_grad"), [(-1, True), (3, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_nucleus_equals_a_masked_softmax_with_its_gradient(top_p, chunk_size, with_entropy_grad, dtype):
    logits, tokens = make_inputs(dtype)
    want = cut_reference(
        logits, tokens, nucleus(logits.double() / 0.7, top_p), temperature=0.7, with_entropy=with_entropy_grad
    )
    num_kept = torch.zeros(ROWS)
    options = {"temperature": 0.7, "chunk_size": chunk_size, "with_entropy_grad": with_entropy_grad}
    got = ours(logits, tokens, top_p=top_p, num_kept=num_kept, **options)
    assert torch.equal(num_kept.long(), want[3])
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 2e-6}
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(got[2].float(), want[2], **tolerance)
    masked = ours(logits, tokens, log_prob_keep_mask=nucleus(logits.double() / 0.7, top_p), **options)
    for a, b in zip(got, masked, strict=True):
        assert torch.equal(a, b), "the same mask, given"


def test_p_of_one_and_no_mask_are_the_same_bits_and_a_full_mask_the_same_numbers():
    logits, tokens = make_inputs()
    whole, everything = ours(logits, tokens), torch.ones(ROWS, VOCAB, dtype=torch.bool)
    assert all(torch.equal(a, b) for a, b in zip(whole, ours(logits, tokens, top_p=1.0), strict=True))
    for a, b in zip(whole, ours(logits, tokens, log_prob_keep_mask=everything), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_target_outside_the_nucleus_is_added_to_it():
    logits = torch.tensor([[0.6, 0.3, 0.08, 0.02]]).log()
    num_kept = torch.zeros(1)
    log_probs, _ = calculate_log_probs_and_entropy(logits, torch.tensor([3]), None, top_p=0.5, num_kept=num_kept)
    assert log_probs.exp().item() == pytest.approx(0.02 / (0.6 + 0.02))
    assert num_kept.item() == 2


def test_the_token_that_crosses_p_is_kept_and_equal_ones_are_kept_together():
    logits = torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]]).log()
    for top_p, size in {0.39: 1, 0.41: 3, 0.7: 3, 0.85: 5}.items():
        num_kept = torch.zeros(1)
        calculate_log_probs_and_entropy(logits, torch.tensor([0]), None, top_p=top_p, num_kept=num_kept)
        assert num_kept.item() == size, top_p


def test_extreme_logits_have_a_nucleus():
    logits = torch.tensor([[1e4, 0.0, -1e4], [-0.0, 0.0, 0.0], [float("-inf"), 1.0, float("-inf")]])
    x, num_kept = logits.requires_grad_(), torch.zeros(3)
    log_probs, _ = calculate_log_probs_and_entropy(x, torch.tensor([0, 1, 1]), None, top_p=0.5, num_kept=num_kept)
    assert num_kept.tolist() == [1, 3, 1]
    torch.testing.assert_close(log_probs.exp(), torch.tensor([1, 1 / 3, 1]))
    log_probs.sum().backward()
    assert torch.isfinite(x.grad).all()


def test_a_mask_and_a_nucleus_exclude_each_other():
    logits, tokens = make_inputs()
    mask = torch.ones(ROWS, VOCAB, dtype=torch.bool)
    with pytest.raises(ValueError, match="top_p 0.5 exclude each other"):
        calculate_log_probs_and_entropy(logits, tokens, None, log_prob_keep_mask=mask, top_p=0.5)


def split_nucleus(rank: int, world_size: int, store_path: str) -> None:
    torch.set_num_threads(1)  # the fork has no thread pool
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=world_size)
    width = VOCAB // world_size
    columns = slice(rank * width, (rank + 1) * width)
    for vocab_size, top_p in ((VOCAB, 0.8), (10, 0.6), (6, 0.9)):  # 6: the second of two ranks holds padding only
        logits, tokens = make_inputs()
        tokens = tokens % vocab_size
        mask = nucleus(logits[:, :vocab_size] / 0.9, top_p)
        want = cut_reference(logits[:, :vocab_size], tokens, mask, temperature=0.9)
        grad = torch.nn.functional.pad(want[2], (0, VOCAB - vocab_size))[:, columns]
        mask = torch.nn.functional.pad(mask, (0, VOCAB - vocab_size))[:, columns]
        options = {"vocab_size": vocab_size, "temperature": 0.9, "chunk_size": 3, "tp_group": dist.group.WORLD}
        for cut in ({"top_p": top_p}, {"log_prob_keep_mask": mask}):
            num_kept = torch.zeros(ROWS)
            got = ours(logits[:, columns].contiguous(), tokens, num_kept=num_kept, **cut, **options)
            assert torch.equal(num_kept.long(), want[3])
            for a, b in zip(got, (*want[:2], grad), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)
    dist.destroy_process_group()


@pytest.mark.processes
def test_a_nucleus_over_a_split_vocabulary_is_the_same(tmp_path):
    mp.start_processes(split_nucleus, args=(2, str(tmp_path / "store")), nprocs=2, start_method="fork")
