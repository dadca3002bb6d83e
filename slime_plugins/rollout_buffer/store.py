"""The buffer itself: records by prompt, bounded, and which groups of them are complete.

Threads may share it. What makes a group valid and how it is transformed, the generator's module says; it knows no
network and starts nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Item = dict[str, Any]
Group = tuple[str, list[Item]]
MAX_KNOWN_UIDS = 100_000


class BufferFull(RuntimeError):
    """No room for another prompt until groups are taken."""


def is_complete(group: Group, min_valid_group_size: int, task_type: str) -> bool:
    """The default `is_valid_group`: as many records as responses were asked for."""
    return len(group[1]) >= min_valid_group_size


def unchanged(group: Group, task_type: str) -> Group:
    """The default `transform_group`."""
    return group


def describe_groups(groups: dict[str, list[Item]]) -> dict[str, Any]:
    """The default `get_group_data_meta_info`: how many groups and records there are, and their mean reward."""
    rewards = [item["reward"] for items in groups.values() for item in items]
    numbers = [reward for reward in rewards if isinstance(reward, int | float)]
    mean = {"avg_reward": sum(numbers) / len(numbers)} if numbers else {}
    return {"total_groups": len(groups), "total_samples": len(rewards), **mean}


@dataclass(frozen=True)
class GroupRules:
    """What a generator's module says about groups; the defaults are above."""

    task_type: str = ""
    is_valid_group: Callable[[Group, int, str], bool] = is_complete
    transform_group: Callable[[Group, str], Group] = unchanged
    get_group_data_meta_info: Callable[[dict[str, list[Item]]], dict[str, Any]] = describe_groups


class RolloutBuffer:
    """Records of at most `max_groups` prompts.

    Args:
        max_groups: prompts with records that were not taken yet.
        max_group_records: records of one prompt.
    """

    def __init__(self, *, max_groups: int = 4096, max_group_records: int = 1024) -> None:
        self._max_groups, self._max_group_records = max_groups, max_group_records
        self._lock = threading.Lock()
        self._groups: OrderedDict[str, list[Item]] = OrderedDict()
        self._uids: OrderedDict[str, None] = OrderedDict()
        self.rules, self.group_size = GroupRules(), 1

    def configure(self, rules: GroupRules, group_size: int) -> None:
        """What the groups of the run that begins are; incomplete ones of the run before can never be completed."""
        with self._lock:
            for instance_id in [key for key in self._groups if not self._is_valid(key)]:
                del self._groups[instance_id]
            self.rules, self.group_size = rules, group_size

    def write(self, item: Item) -> bool:
        """Add a record; False when one with its uid was here before.

        Raises:
            BufferFull: the record would open one group too many, or its group is full.
        """
        with self._lock:
            uid, instance_id = item.get("uid"), item["instance_id"]
            if uid is not None and uid in self._uids:
                return False
            if instance_id not in self._groups and len(self._groups) >= self._max_groups:
                raise BufferFull(f"the buffer holds {len(self._groups)} prompts (--max-groups)")
            items = self._groups.setdefault(instance_id, [])
            if len(items) >= self._max_group_records:
                raise BufferFull(f"prompt {instance_id} has {len(items)} records and is not taken as a valid group")
            items.append(item)
            if uid is not None:
                self._uids[uid] = None
                if len(self._uids) > MAX_KNOWN_UIDS:
                    self._uids.popitem(last=False)
            return True

    def take(self, max_groups: int | None = None) -> tuple[list[Group], dict[str, Any]]:
        """Remove the valid groups, the oldest first; returns them transformed, and what they are like."""
        with self._lock:
            valid = [key for key in self._groups if self._is_valid(key)][:max_groups]
            taken = [(key, self._groups.pop(key)) for key in valid]
        info = self.rules.get_group_data_meta_info(dict(taken)) if taken else {}
        return [self.rules.transform_group(group, self.rules.task_type) for group in taken], info

    def clear(self) -> None:
        """Forget every record."""
        with self._lock:
            self._groups.clear()

    def counts(self) -> dict[str, int]:
        """Prompts in the buffer, and how many of them make valid groups."""
        with self._lock:
            return {"prompts": len(self._groups), "valid_groups": sum(map(self._is_valid, self._groups))}

    def _is_valid(self, instance_id: str) -> bool:
        return self.rules.is_valid_group(
            (instance_id, self._groups[instance_id]), self.group_size, self.rules.task_type
        )
