"""Loading a bucket of weights a second time by the copies that the first load was made of."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils.bucket_load import ElementCopies, Recipes


class Engine:
    """A model that fuses two tensors, keeps the left half of a third, and pads a vocabulary, as SGLang's models do."""

    def __init__(self) -> None:
        self.model = torch.nn.ParameterDict(
            {"gate_up": torch.zeros(4, 3), "down": torch.zeros(2, 2), "vocab": torch.ones(5, 2)}
        ).requires_grad_(False)
        self.recipes = Recipes()
        self.num_walks = 0
        self.more: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None

    def walk(self, tensors: dict[str, torch.Tensor]) -> str:
        self.num_walks += 1
        for part, name in enumerate(("gate", "up")):
            self.model["gate_up"].data.narrow(0, 2 * part, 2).copy_(tensors[name])
        self.model["down"].data.copy_(tensors["down"].narrow(1, 0, 2))
        self.model["vocab"][:3].data.copy_(tensors["vocab"])
        self.model["vocab"][3:].data.fill_(0)
        self.model["vocab"][5:].data.fill_(7)
        self.more(tensors)
        return "Success"

    def load(self, tensors: dict[str, torch.Tensor], *, pad_last: bool = True) -> str:
        """As the server does: out of one run of bytes."""
        starts, data = [], b""
        for tensor in tensors.values():
            starts.append(len(data))
            data += tensor.contiguous().numpy().tobytes().ljust(256, b"\0")
        if not pad_last:
            data = data[: starts[-1] + tensor.nbytes]
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.bucket = weakref.ref(flat.untyped_storage())
        metadata = [
            SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start)
            for (name, tensor), start in zip(tensors.items(), starts, strict=True)
        ]
        parts = {
            m.name: flat[m.start_idx : m.start_idx + tensors[m.name].nbytes].view(m.dtype).view(m.shape)
            for m in metadata
        }
        return str(self.recipes.load(self.model, flat, metadata, lambda: self.walk(parts)))


def random_tensors(seed: int, **dtypes: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    shapes = {"gate": (2, 3), "up": (2, 3), "down": (2, 4), "vocab": (3, 2)}
    return {name: torch.randn(shape).to(dtypes.get(name, torch.float32)) for name, shape in shapes.items()}


def assert_holds(engine: Engine, tensors: dict[str, torch.Tensor]) -> None:
    expected = {
        "gate_up": torch.cat([tensors["gate"], tensors["up"]]).float(),
        "down": tensors["down"][:, :2].float(),
        "vocab": torch.cat([tensors["vocab"], torch.zeros(2, 2)]).float(),
    }
    for name, value in expected.items():
        assert torch.equal(engine.model[name], value), name


def test_a_bucket_that_comes_again_is_loaded_without_a_walk_over_the_model():
    engine = Engine()
    for seed in range(3):
        for parameter in engine.model.values():
            parameter.data.fill_(9)
        assert engine.load(random_tensors(seed)) == "Success"
        assert_holds(engine, random_tensors(seed))
    assert engine.num_walks == 1


def test_copies_cast_as_they_did_the_first_time():
    engine = Engine()
    for seed in range(2):
        tensors = random_tensors(seed, gate=torch.float16, vocab=torch.float64)
        engine.load(tensors)
        assert_holds(engine, tensors)
    assert engine.num_walks == 1


def test_a_bucket_with_other_shapes_types_or_order_is_another_bucket():
    engine = Engine()
    engine.load(random_tensors(0))
    engine.load(random_tensors(1, gate=torch.float16))
    assert_holds(engine, random_tensors(1, gate=torch.float16))
    engine.load(dict(reversed(random_tensors(2).items())))
    assert_holds(engine, random_tensors(2))
    assert engine.num_walks == 3


@pytest.mark.parametrize(
    "more",
    [
        lambda engine, tensors: engine.model["down"].data.mul_(2),
        lambda engine, tensors: tensors["gate"].sum().item(),
        lambda engine, tensors: engine.model["down"].data.copy_(tensors["down"][:, 2:]),
        lambda engine, tensors: engine.model["down"].data.copy_(torch.eye(2)),
        lambda engine, tensors: engine.scratch.copy_(tensors["gate"]),
    ],
    ids=["computes", "looks at a value", "writes twice", "writes a constant", "writes no parameter"],
)
def test_a_load_that_is_more_than_copying_is_never_shortened(more: Any, caplog: pytest.LogCaptureFixture):
    engine = Engine()
    engine.scratch = torch.zeros(2, 3)
    engine.more = lambda tensors: more(engine, tensors)
    for seed in range(3):
        engine.load(random_tensors(seed))
    assert engine.num_walks == 3
    assert caplog.text.count("(gate, ...) is always loaded tensor by tensor") == 1


def test_what_other_threads_copy_is_copied_by_them_each_time(caplog: pytest.LogCaptureFixture):
    """SGLang loads DeepSeek's weights so on CPU; a watcher sees its own thread alone."""
    engine = Engine()
    walk = engine.walk

    def in_a_thread(tensors: dict[str, torch.Tensor]) -> str:
        with ThreadPoolExecutor() as threads:
            return threads.submit(walk, tensors).result()

    engine.walk = in_a_thread  # type: ignore[method-assign]
    for seed in range(3):
        assert engine.load(random_tensors(seed)) == "Success"
        assert_holds(engine, random_tensors(seed))
    assert engine.num_walks == 3
    assert caplog.text.count("(gate, ...) is always loaded tensor by tensor") == 1
    assert "work for other threads" in caplog.text
    assert ThreadPoolExecutor.submit.__module__ == "concurrent.futures.thread"


def test_a_bucket_that_a_model_has_no_use_for_may_come_again():
    """A drafting model gets the buckets of the whole one, and takes those of its own layer."""
    engine = Engine()
    engine.walk = lambda tensors: "Success"  # type: ignore[method-assign]
    before = {name: parameter.clone() for name, parameter in engine.model.items()}
    for seed in range(3):
        assert engine.load(random_tensors(seed)) == "Success"
    assert all(torch.equal(engine.model[name], value) for name, value in before.items())


def test_bytes_at_the_end_of_a_bucket_that_fill_no_element_of_another_type_do_no_harm():
    engine = Engine()
    engine.model["flag"] = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    engine.more = lambda tensors: engine.model["flag"].data.copy_(tensors["flag"])
    for seed in range(2):
        tensors = {**random_tensors(seed), "flag": torch.full((3,), seed, dtype=torch.uint8)}
        engine.load(tensors, pad_last=False)
        assert_holds(engine, tensors)
        assert engine.model["flag"].tolist() == [seed] * 3
    assert engine.num_walks == 1


def test_a_parameter_that_moved_is_found_by_a_walk():
    engine = Engine()
    engine.load(random_tensors(0))
    old = engine.model["down"]
    engine.model["down"] = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    for seed in (1, 2):
        engine.load(random_tensors(seed))
        assert_holds(engine, random_tensors(seed))
    assert engine.num_walks == 2
    assert torch.equal(old, random_tensors(0)["down"][:, :2])


def test_nothing_of_a_bucket_is_kept_so_that_its_memory_can_be_used_again():
    engine = Engine()
    for seed in range(2):
        engine.load(random_tensors(seed))
        assert engine.bucket() is None


def test_a_load_that_fails_leaves_no_recipe_and_is_not_watched_again():
    engine = Engine()
    engine.more = lambda tensors: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.load(random_tensors(0))
    engine.more = lambda tensors: None
    for seed in (1, 2):
        engine.load(random_tensors(seed))
        assert_holds(engine, random_tensors(seed))
    assert engine.num_walks == 3


# ---- single elements


def known(engine: Engine, tensors: dict[str, torch.Tensor]) -> ElementCopies:
    elements = ElementCopies(engine.model)
    elements.load(tensors, lambda: engine.walk(tensors), "one")
    return elements


def test_changing_single_elements_gives_the_weights_of_a_whole_load():
    """In two fused tensors, in one whose left half is kept, and in a padded one; in two types."""
    engine, tensors = Engine(), random_tensors(0, up=torch.bfloat16)
    elements = known(engine, tensors)
    assert elements.knows(["gate", "vocab"], "one") and not elements.knows(["gate"], "two")
    assert not elements.knows(["gate", "other"], "one")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        where = torch.nonzero(torch.rand(tensor.numel(), generator=generator) < 0.5).view(-1)
        tensor.view(-1)[where] = torch.randn(where.numel(), generator=generator).to(tensor.dtype)
        bits = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        elements.change(name, where, tensor.view(-1)[where].view(bits))
    assert_holds(engine, tensors)
    assert engine.num_walks == 1


@pytest.mark.parametrize(
    "more",
    [
        lambda engine, tensors: engine.model["down"].data.mul_(2),
        lambda engine, tensors: engine.model["down"].data.copy_(torch.eye(2)),
        lambda engine, tensors: engine.model["down"].data.copy_(tensors["vocab"][:2]),
        lambda engine, tensors: engine.model["square"].data.copy_(tensors["down"].T),
    ],
    ids=["computes", "writes a constant", "writes twice", "turns axes"],
)
def test_of_a_load_that_is_more_than_copying_no_single_element_is_changed(more: Any):
    engine, tensors = Engine(), random_tensors(0)
    engine.model["square"] = torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False)
    engine.more = lambda tensors: more(engine, tensors)
    assert not known(engine, tensors).knows(["gate"], "one")


def test_parameters_that_were_moved_are_not_changed_where_they_were():
    engine, tensors = Engine(), random_tensors(0)
    elements = known(engine, tensors)
    engine.model["gate_up"] = torch.nn.Parameter(engine.model["gate_up"].clone(), requires_grad=False)
    assert not elements.knows(["gate"], "one")
