"""An estimator whose baseline one outlier in a group does not move."""

import statistics

from slime.algorithms.estimators import Estimator

MEDIAN = Estimator("A = r - median of the group", baseline="slime_more.estimators:group_median")


def group_median(rewards, lengths):
    """Return the baseline of each response of a group, from all rewards and numbers of trained tokens."""
    return [statistics.median(rewards)] * len(rewards)
