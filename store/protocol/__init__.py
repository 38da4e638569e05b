"""Pure: how requests, answers and pushes become bytes, and back; told the bytes, never reading them."""
