"""Our C++ kernels for the CPU: built on first use, called through a plain C interface, never required."""
