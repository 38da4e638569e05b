"""Requests, answers and pushes as bytes, and back."""
