"""The commands; their entry points are modules at the package's root."""
