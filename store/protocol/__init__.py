"""Pure: requests, answers and pushes as bytes, and back."""
