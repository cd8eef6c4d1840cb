"""The training engine: AdamW with its state on the CPU, fed by hooks while backward runs."""

from superoffload.engine.blocks import Block, find_blocks
from superoffload.engine.loss import chunked_cross_entropy
from superoffload.engine.optimizer import OffloadAdamW, Stats
from superoffload.engine.start import RandomWeights, SafetensorsWeights, WeightSource

__all__ = [
    "Block",
    "OffloadAdamW",
    "RandomWeights",
    "SafetensorsWeights",
    "Stats",
    "WeightSource",
    "chunked_cross_entropy",
    "find_blocks",
]
