"""Wrappers of the kernel and tools: system calls, descriptors, loop devices, programs."""
