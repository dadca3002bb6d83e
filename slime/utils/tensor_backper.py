"""Public path of TensorBackuper, which is in slime.utils.accelerator; the spelling is upstream's."""

from slime.utils.accelerator.tensor_backper import TensorBackuper

__all__ = ["TensorBackuper"]
