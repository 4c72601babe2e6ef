"""MetaRM: predict the process reward from the critique, for pairs without a human critique."""
