"""How well a judge's critique agrees with a human's: arguments, one-to-one matching, and scorers of their meaning."""
