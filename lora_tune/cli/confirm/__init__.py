"""More seeds of the leading trials, until one is shown to be better."""
