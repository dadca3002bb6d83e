"""Adam with master weights, its state, the learning rate, and which parameters are trained."""
