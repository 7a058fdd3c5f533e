"""What shows that the host can be believed."""
