"""What a trainer's process does before it may touch its GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.ray import train_actor

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parent.parent.parent
LOAD = """
import sys
from types import SimpleNamespace
import torch
asked = []
torch.cuda._lazy_init = lambda: asked.append(True)  # what every use of a GPU by torch begins with
from slime.ray.train_actor import TrainRayActor
assert "megatron" not in sys.modules
flags = {"train_backend": "megatron", "debug_train_only": False, "colocate": True, "lora_rank": 0}
flags |= {"update_weight_transport": "nccl", "update_weight_mode": "full"}
actor = TrainRayActor(SimpleNamespace(accelerator=sys.argv[1], **flags), 0, 1, sys.argv[2])
actor.load()
assert "slime.backends.megatron_utils.actor" in sys.modules
assert not asked and not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
before = set(sys.modules)
actor.load()
assert set(sys.modules) == before
from slime.backends.sglang_utils.weight_transfer import EXPECTED, NUM_BYTES, _openers, opened_elsewhere, serialize_flat
assert len(_openers) == (sys.argv[1] == "cuda"), "it is started where the first sync hands CUDA memory over"
if _openers:
    for value, answer in ((EXPECTED, None), (EXPECTED + 1, "the memory that was opened holds something else")):
        handles, kept = serialize_flat(torch.full((NUM_BYTES,), value, dtype=torch.uint8), [], 1)
        assert opened_elsewhere(handles[0]) == answer
    assert not _openers
"""


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_loading_imports_the_trainer_and_asks_for_no_gpu(accelerator: str, tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    done = subprocess.run(
        [sys.executable, "-c", LOAD, accelerator, str(log)],
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, log.read_text()[-3000:]
    assert "imported everything in" in log.read_text()


SAVE = """
import sys
from types import SimpleNamespace
from slime.ray.train_actor import TrainRayActor
from slime.training.resume import DiskFull
actor = TrainRayActor(SimpleNamespace(accelerator="cpu"), 0, 1, sys.argv[1])
def save_model(rollout_id):
    if rollout_id:
        raise DiskFull("3 GB are missing")
actor._actor = SimpleNamespace(save_model=save_model, wake_up=lambda: {"perf/wake_up_time": 2.0})
assert actor.call("save_model", 0) is None and actor.call("save_model", 1) == "3 GB are missing"
assert actor.call("wake_up") == {"perf/wake_up_time": 2.0}
"""


def test_a_verb_reaches_the_trainer_and_a_full_disk_is_its_answer(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    done = subprocess.run([sys.executable, "-c", SAVE, log], cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, log.read_text()[-3000:]


TRAIN_TWICE = """
import gc, sys
from types import SimpleNamespace
from slime.ray.train_actor import TrainRayActor
actor = TrainRayActor(SimpleNamespace(accelerator="cpu", colocate=False, use_critic=False), 0, 1, sys.argv[1])
actor._actor = SimpleNamespace(train=lambda *_: [], columns_for_critic=None)
made = [[] for _ in range(1000)]
counts = [gc.get_freeze_count()]
for rollout_id in range(2):
    actor.train(rollout_id, [], None)
    counts.append(gc.get_freeze_count())
assert counts[1] >= counts[0] + 1000 and counts[2] == counts[1], counts
"""


def test_what_the_first_training_leaves_is_not_looked_through_at_each_sleep(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    done = subprocess.run([sys.executable, "-c", TRAIN_TWICE, log], cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, log.read_text()[-3000:]


@pytest.mark.parametrize(
    ("flags", "free", "empties"),
    [
        ({"colocate": True, "offload_rollout": True}, 0.5, True),  # engines come back for it
        ({"colocate": True}, 0.5, False),
        ({"colocate": True}, 0.05, True),  # engines that stay need more at times
        ({}, 0.05, False),  # a GPU of its own
        ({"use_critic": True}, 0.5, True),
    ],
)
def test_torchs_cache_goes_where_others_on_the_gpu_need_the_memory(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, bool], free: float, empties: bool
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(train_actor.accelerator, "free_share", lambda: free)
    monkeypatch.setattr(train_actor.accelerator, "empty_cache", lambda: emptied.append(True))
    actor = object.__new__(train_actor.TrainRayActor)
    actor.args = SimpleNamespace(**{"colocate": False, "offload_rollout": False, "use_critic": False, **flags})
    actor._make_room()
    assert bool(emptied) is empties
