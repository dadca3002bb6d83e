"""Public path of what a dynamic filter answers, which is in slime.rollout.filter_hub."""

from slime.rollout.filter_hub import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)

__all__ = ["DynamicFilterOutput", "MetricGatherer", "call_dynamic_filter", "should_drop_dynamic_filter_output"]
