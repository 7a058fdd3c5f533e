"""LLVM IR rewritten so that accesses are checked and work is counted."""
