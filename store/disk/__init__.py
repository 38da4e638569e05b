"""What is in a data directory, and how it is kept whole: files, rows, formats, copies."""
