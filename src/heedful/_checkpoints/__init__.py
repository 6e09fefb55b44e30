"""Checkpoints of any size, read and written one tensor at a time.

``open_checkpoint`` gives the tensors of a Hugging Face folder, a ``.safetensors`` file, a state dict or a LoRA adapter
as views of the mapped files. ``CheckpointWriter`` streams tensors to shards in a hidden folder, which takes its name when
all is complete; an interrupted run goes on with the shards that are.
"""

from heedful._checkpoints._companions import companions as companions
from heedful._checkpoints._open import open_checkpoint as open_checkpoint
from heedful._checkpoints._safetensors import TensorInfo as TensorInfo
from heedful._checkpoints._source import TensorSource as TensorSource
from heedful._checkpoints._writer import CheckpointWriter as CheckpointWriter
