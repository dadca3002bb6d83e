"""The teacher on one rank: a Megatron model that scores packed sequences, and takes new weights from disk.

Every tensor-parallel rank calls the same methods with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime.algorithms.log_probs import calculate_log_probs_and_entropy
from slime.backends.megatron_utils.checkpoint.iterations import CheckpointSource, load_checkpoint
from slime.backends.megatron_utils.data import Packing, pack
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.model.model_weights import named_tensors
from slime.backends.megatron_utils.model.setup import build_model
from slime.backends.megatron_utils.passes.forward import run_model
from slime.backends.megatron_utils.server.flags import ServerArgs
from slime.backends.megatron_utils.server.requests import Alternatives, GenerateBody, Score
from slime.checkpoints.paths import classify_checkpoint
from slime.config.megatron.arguments import model_differences
from slime.utils import accelerator
from slime.utils.accelerator.tensor_backper import TensorBackuper
from slime.utils.distributed_utils import get_gloo_group
from slime.utils.errors import UsageError, refuse
from slime.utils.misc import attempt

_BEFORE = "before the update"


class Scorer:
    """This rank's share of the teacher.

    Args:
        args: flags of the server; `initialize.init` has run with them.
    """

    def __init__(self, args: ServerArgs) -> None:
        self.args = args
        self.model = build_model(args).eval()
        self._weights = TensorBackuper(lambda: ((name, t.data) for name, t in named_tensors(self.model)))
        self._load(args.load or args.hf_checkpoint, args.ckpt_step)

    def update_weights(self, path: str, step: int | None) -> None:
        """Replace the weights by those at `path`; where any rank cannot, all keep what they had.

        Raises:
            UsageError: no checkpoint of a model of this shape is there.
        """
        if classify_checkpoint(path) is None:
            raise UsageError(f"{path} is no checkpoint: neither a Megatron root nor an HF directory.")
        refuse(model_differences(self.args, "model_path", path, step))
        self._weights.backup(_BEFORE)
        _, failure = attempt(self._load, path, step)  # the other ranks must hear of it, and the old weights come back
        error = (str(failure) or repr(failure)) if failure else None
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error, group=get_gloo_group())
        if found := [text for text in errors if text is not None]:
            self._weights.restore(_BEFORE)
            raise UsageError(f"{found[0]} The weights are as they were.")

    def _load(self, path: str, step: int | None) -> None:
        if classify_checkpoint(path) == "megatron":
            load_checkpoint(CheckpointSource(path, step, False, False), model=[self.model])
        else:
            load_hf_weights(self.args, [self.model], path)

    @torch.no_grad()
    def score(self, requests: Sequence[GenerateBody]) -> list[Score]:
        """Log-probs at temperature 1, and what else is asked for, of sequences packed into one micro-batch."""
        device, args = accelerator.current_device(), self.args
        tokens = [torch.tensor(request.input_ids, device=device) for request in requests]
        logits = run_model(self.model, pack(tokens, Packing(args.tensor_model_parallel_size))).squeeze(0)
        rows, first = [], 0
        for request in requests:
            rows.append(torch.arange(first + request.start, first + len(request.input_ids) - 1, device=device))
            first += len(request.input_ids)
        targets = torch.cat([ids[request.start + 1 :] for ids, request in zip(tokens, requests, strict=True)])
        log_probs, _ = calculate_log_probs_and_entropy(
            logits,
            targets,
            parallel_state.get_tensor_model_parallel_group(),
            chunk_size=args.teacher_label_reduction_chunk_size,
            vocab_size=args.vocab_size,
            rows=torch.cat(rows),
        )
        per_request = log_probs.split([request.num_scored for request in requests])
        scores = [Score(values.tolist()) for values in per_request]
        for score, request, places in zip(scores, requests, rows, strict=True):
            self._add_alternatives(score, request, logits, places)
        return scores

    def _add_alternatives(
        self, score: Score, request: GenerateBody, logits: torch.Tensor, places: torch.Tensor
    ) -> None:
        def most_likely(log_p: torch.Tensor, chunk: slice) -> Alternatives:
            return _pairs(*log_p.topk(request.top_logprobs_num, dim=-1))

        def drawn(log_p: torch.Tensor, chunk: slice) -> Alternatives:
            ids = torch.multinomial(log_p.exp(), request.sample_n, replacement=True, generator=generator)
            return _pairs(log_p.gather(1, ids), ids)

        def labels(log_p: torch.Tensor, chunk: slice) -> Alternatives:
            asked = (request.labels or [])[chunk]
            return [[(row[i].item(), i) for i in ids] for row, ids in zip(log_p.cpu(), asked, strict=True)]

        sizes = self.args.teacher_sample_reduction_chunk_size, self.args.teacher_label_reduction_chunk_size
        if request.top_logprobs_num:
            score.top = self._map_chunks(most_likely, logits, places, sizes[0])
        if request.labels is not None:
            score.labels = self._map_chunks(labels, logits, places, sizes[1])
        if request.sample_n:
            generator = torch.Generator(device=logits.device).manual_seed(request.sample_seed)
            score.samples = self._map_chunks(drawn, logits, places, sizes[0])

    def _map_chunks(
        self,
        function: Callable[[torch.Tensor, slice], Alternatives],
        logits: torch.Tensor,
        rows: torch.Tensor,
        size: int,
    ) -> Alternatives:
        """`function` of the log-probs [n, V] of `size` rows at a time, gathered over the tensor-parallel ranks."""
        found: Alternatives = []
        group = parallel_state.get_tensor_model_parallel_group()
        for start in range(0, len(rows), size):
            chunk = slice(start, min(start + size, len(rows)))
            local = logits[rows[chunk]].float()
            parts = [torch.empty_like(local) for _ in range(group.size())]
            dist.all_gather(parts, local, group=group)
            found += function(torch.cat(parts, dim=-1)[:, : self.args.vocab_size].log_softmax(-1), chunk)
        return found


def _pairs(log_probs: torch.Tensor, ids: torch.Tensor) -> Alternatives:
    rows = zip(log_probs.tolist(), ids.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]
