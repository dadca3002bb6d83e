"""A driver in the shape of upstream's train.py, on the names that it uses; the loop is yours to change.

PYTHONPATH=. python examples/own_driver/driver.py --accelerator cpu --colocate ... (the flags of train.py)
"""

import ray

from slime.observability.logging_utils import configure_logger, init_tracking
from slime.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
from slime.utils.arguments import parse_args
from slime.utils.misc import should_run_periodic_action


def train(args):
    pgs = create_placement_groups(args)
    init_tracking(args)
    rollout_manager, num_rollout_per_epoch = create_rollout_manager(args, pgs["rollout"])
    actor_model, critic_model = create_training_models(args, pgs, rollout_manager)
    actor_model.update_weights()

    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        if args.eval_interval is not None and rollout_id == 0 and not args.skip_eval_before_train:
            ray.get(rollout_manager.eval.remote(rollout_id))
        rollout_data_ref = ray.get(rollout_manager.generate.remote(rollout_id))
        if critic_model is not None:
            ray.get(critic_model.async_train(rollout_id, rollout_data_ref))
        ray.get(actor_model.async_train(rollout_id, rollout_data_ref))
        if should_run_periodic_action(rollout_id, args.save_interval, num_rollout_per_epoch, args.num_rollout):
            actor_model.save_model(rollout_id)
        actor_model.update_weights()
        if should_run_periodic_action(rollout_id, args.eval_interval, num_rollout_per_epoch, args.num_rollout):
            ray.get(rollout_manager.eval.remote(rollout_id))

    ray.get(rollout_manager.dispose.remote())


if __name__ == "__main__":
    configure_logger()
    train(parse_args())
