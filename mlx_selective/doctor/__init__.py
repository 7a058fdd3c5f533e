"""The self-check of an installation."""
