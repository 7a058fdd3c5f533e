"""Metal text to a library: the preprocessor, the dialect, the compiler and its cache."""
