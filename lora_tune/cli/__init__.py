"""What the commands do, below their names at the package's root."""
