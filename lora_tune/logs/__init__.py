"""What a log says: the parsed run, readers of each format, the text of failures."""
