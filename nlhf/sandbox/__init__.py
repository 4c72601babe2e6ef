"""The sandbox: a small world with known truth in which every method trains in about a minute on a laptop."""
