"""What every worker process of a suite needs, imported once by the fork server and then shared."""

import nlhf.cold_start
import nlhf.evaluate
import nlhf.generation
import nlhf.train
import nlhf.training
import trl  # noqa: F401
from trl import GRPOConfig, GRPOTrainer  # noqa: F401
