"""What every worker process of a suite needs, imported once by the fork server and then shared."""

from trl import GRPOConfig, GRPOTrainer

from nlhf import cold_start, evaluate, generation, train

__all__ = ["GRPOConfig", "GRPOTrainer", "cold_start", "evaluate", "generation", "train"]
