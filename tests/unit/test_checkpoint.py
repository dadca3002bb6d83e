"""A run that is saved and resumed goes on bit for bit; another layout can load what one saved."""

from __future__ import annotations

import json

import pytest
import torch

from slime.checkpoints.paths import MODEL_SHAPE_FILE, TRACKER_FILE, latest_iteration
from slime.utils.errors import UsageError
from tests.unit.megatron_fakes import make_args, make_hf_model, packed, run_world

pytestmark = pytest.mark.processes

LENGTHS = [8, 4, 12]
RUN = {
    "num_rollout": 8,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 1,
    "global_batch_size": 4,
    "ppo_epochs": 1,
    "lr": 1e-2,
}
FLAGS = "--lr-decay-style cosine --lr-warmup-iters 2 --adam-eps 1e-5 --weight-decay 0.1 --hidden-dropout 0.1"


def build(args):
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model.setup import setup_model_and_optimizer

    state = setup_model_and_optimizer(args)
    load_hf_weights(args, state.model, args.hf_checkpoint)
    state.optimizer.reload_model_params()
    return state


def train_step(args, state, step):
    """One update on tokens that depend on `step`; returns the loss, which dropout makes random too."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    chunk = state.model[0]
    chunk.train()
    chunk.zero_grad_buffer()
    ids = torch.randint(0, args.vocab_size, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(step))
    logits = chunk(ids, None, None, packed_seq_params=packed(LENGTHS)).transpose(0, 1).clone()
    loss = vocab_parallel_cross_entropy(logits, ids.roll(-1, 1).transpose(0, 1)).mean()
    loss.backward()
    finalize_model_grads([chunk])
    state.optimizer.step()
    state.scheduler.step(increment=args.global_batch_size)
    return loss.item()


def save_after_two_steps(args, root, contents=("model", "optimizer", "rng")):
    """Train two steps, save as iteration 1, train two more; rank 0 notes the losses of those and the final weights."""
    from slime.backends.megatron_utils.checkpoint.iterations import begin_checkpoint
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets
    from slime.config.megatron.arguments import model_shape

    state = build(args)
    for step in (0, 1):
        train_step(args, state, step)
    begin_checkpoint(
        root,
        1,
        model=state.model,
        optimizer=state.optimizer,
        scheduler=state.scheduler,
        contents=contents,
        model_shape=model_shape(args),
    ).finish()
    losses = [train_step(args, state, step) for step in (2, 3)]
    weights = dict(pair for bucket in iter_hf_buckets(args, state.model, buffer_size=10_000) for pair in bucket)
    if torch.distributed.get_rank() == 0:
        torch.save({"losses": losses, "weights": weights}, root / "expected.pt")


def resume(args, root, tolerance):
    from slime.backends.megatron_utils.checkpoint.iterations import CheckpointSource, load_checkpoint
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets

    state = build(args)
    train_step(args, state, 7)  # anything that loading must undo
    source = CheckpointSource(str(root))
    iteration = load_checkpoint(source, model=state.model, optimizer=state.optimizer, scheduler=state.scheduler)
    assert iteration == 1
    expected = torch.load(root / "expected.pt")
    losses = [train_step(args, state, step) for step in (2, 3)]
    weights = dict(pair for bucket in iter_hf_buckets(args, state.model, buffer_size=10_000) for pair in bucket)
    assert weights.keys() == expected["weights"].keys()
    if tolerance == 0:
        assert losses == expected["losses"]
        assert all(torch.equal(weights[name], expected["weights"][name]) for name in weights)
    else:
        assert losses == pytest.approx(expected["losses"], abs=tolerance)
        for name in weights:
            torch.testing.assert_close(weights[name], expected["weights"][name], atol=tolerance, rtol=0)


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    make_hf_model(tmp_path / "hf")
    args = make_args(tmp_path / "hf", FLAGS, **RUN)
    run_world(1, save_after_two_steps, args, tmp_path)
    assert latest_iteration(tmp_path) == 1
    shape = json.loads((tmp_path / "iter_0000001" / MODEL_SHAPE_FILE).read_text())
    assert (shape["num_layers"], shape["kv_channels"]) == (2, 16)
    assert not list(tmp_path.glob(".*"))  # no temporary name is left
    run_world(1, resume, args, tmp_path, 0)
    # Two data-parallel ranks on the same tokens average to the same gradient.
    no_dropout = FLAGS.replace("--hidden-dropout 0.1", "")
    plain = make_args(tmp_path / "hf", no_dropout, **RUN)
    run_world(1, save_after_two_steps, plain, tmp_path)
    run_world(2, resume, make_args(tmp_path / "hf", no_dropout, **RUN, actor_num_gpus_per_node=2), tmp_path, 1e-5)


def test_a_checkpoint_of_one_rank_resumes_on_two_tensor_parallel_ranks(tmp_path):
    make_hf_model(tmp_path / "hf", tied=True, vocab=300)
    flags = FLAGS.replace("--hidden-dropout 0.1", "")
    run_world(1, save_after_two_steps, make_args(tmp_path / "hf", flags, **RUN), tmp_path)
    two = make_args(tmp_path / "hf", flags + " --tensor-model-parallel-size 2 --sequence-parallel", **RUN)
    run_world(2, resume, two, tmp_path, 1e-5)
    run_world(2, save_after_two_steps, two, tmp_path)
    run_world(2, resume, two, tmp_path, 0)


def load_what_is_there(args, root):
    from slime.backends.megatron_utils.checkpoint.iterations import CheckpointSource, begin_checkpoint, load_checkpoint

    state = build(args)
    with pytest.raises(UsageError, match="iter_0000001"):
        load_checkpoint(CheckpointSource(str(root), step=5), model=state.model, optimizer=state.optimizer)
    source = CheckpointSource(str(root), load_optimizer=False, load_rng=False)
    assert load_checkpoint(source, model=state.model, optimizer=state.optimizer) == 1
    loaded = [p.detach().clone() for p in state.model[0].parameters()]
    # The optimizer steps from the loaded weights, not from those that it was built with.
    state.scheduler.step(0)
    for group in state.optimizer.param_groups:
        group["lr"] = 0.0
    state.model[0].zero_grad_buffer()
    state.optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(state.model[0].parameters(), loaded, strict=True))

    begin_checkpoint(root, "release", model=state.model).finish()
    state = build(args)
    everything = CheckpointSource(str(root))
    assert load_checkpoint(everything, model=state.model, optimizer=state.optimizer) is None
    assert all(torch.equal(p, old) for p, old in zip(state.model[0].parameters(), loaded, strict=True))


def test_weights_alone_load_where_no_optimizer_state_was_saved(tmp_path):
    make_hf_model(tmp_path / "hf")
    args = make_args(tmp_path / "hf", FLAGS, **RUN)
    # In 16 bit the optimizer has weights of its own, in fp32; otherwise there is nothing to forget.
    vars(args).update(bf16=True, params_dtype=torch.bfloat16)
    run_world(1, save_after_two_steps, args, tmp_path, ("model",))
    run_world(1, load_what_is_there, args, tmp_path)
    assert (tmp_path / TRACKER_FILE).read_text() == "release"


def load_with_a_warning(args, root, contents):
    """Load everything from a checkpoint of these contents: what is not there is said once and is as it was before."""
    import logging

    from slime.backends.megatron_utils.checkpoint import iterations as module

    said = []
    module.logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())
    state = build(args)
    train_step(args, state, 7)
    steps_before, random_before = state.scheduler.num_steps, torch.get_rng_state()
    source = module.CheckpointSource(str(root))
    assert module.load_checkpoint(source, model=state.model, optimizer=state.optimizer, scheduler=state.scheduler) == 1
    assert (state.scheduler.num_steps == steps_before) == ("optimizer" not in contents)
    assert torch.equal(torch.get_rng_state(), random_before) == ("rng" not in contents)
    missing = [
        what for part, what in {"optimizer": "no optimizer", "rng": "no random"}.items() if part not in contents
    ]
    assert torch.distributed.get_rank() != 0 or len(said) == len(missing)
    assert torch.distributed.get_rank() == 0 or not said
    assert all(what in sentence for what, sentence in zip(missing, said, strict=False))
    train_step(args, state, 2)


@pytest.mark.parametrize("contents", [("model",), ("model", "rng"), ("model", "optimizer")])
def test_what_a_checkpoint_does_not_hold_is_said_once_and_starts_fresh(tmp_path, contents):
    make_hf_model(tmp_path / "hf")
    args = make_args(tmp_path / "hf", FLAGS, **RUN, actor_num_gpus_per_node=2)
    run_world(2, save_after_two_steps, args, tmp_path, contents)
    files = {path.name for path in (tmp_path / "iter_0000001").iterdir()}
    assert MODEL_SHAPE_FILE in files
    run_world(2, load_with_a_warning, args, tmp_path, contents)


def fail_while_saving(args, root):
    from megatron.core import dist_checkpointing

    from slime.backends.megatron_utils.checkpoint.iterations import begin_checkpoint

    state = build(args)
    begin_checkpoint(root, 3, model=state.model, optimizer=state.optimizer, scheduler=state.scheduler).finish()
    real = dist_checkpointing.save
    dist_checkpointing.save = lambda state, path, **_: (real(state, path), (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        begin_checkpoint(root, 4, model=state.model, optimizer=state.optimizer, scheduler=state.scheduler).finish()


def test_a_save_that_is_cut_off_leaves_the_previous_checkpoint_in_force(tmp_path):
    make_hf_model(tmp_path / "hf")
    run_world(1, fail_while_saving, make_args(tmp_path / "hf", FLAGS, **RUN), tmp_path)
    assert latest_iteration(tmp_path) == 3
    assert not (tmp_path / "iter_0000004").exists()
