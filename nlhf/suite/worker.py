"""What every worker process of a suite needs, imported once by the fork server and then shared."""

from trl import GRPOConfig, GRPOTrainer

from nlhf import callbacks, cold_start, evaluate, generation, train

__all__ = ["GRPOConfig", "GRPOTrainer", "callbacks", "cold_start", "evaluate", "generation", "train"]
