"""What one rank does with a rollout: passes without gradients, passes of training, their metrics, dumps and checks."""
