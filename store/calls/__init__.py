"""What any store can do: every named call, over one `call`, for those who await and those who block."""
