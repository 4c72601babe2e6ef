"""Role-play: dual-layer turns, and the principles and judgements of HER-RM (arXiv 2601.21459); see docs/roleplay.md."""
