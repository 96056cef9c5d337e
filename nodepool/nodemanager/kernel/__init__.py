"""Thin calls of the kernel and of its tools: system calls, descriptors, loop devices, programs with a deadline."""
