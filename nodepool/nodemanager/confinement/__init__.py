"""Rights of programs in slivers: privileges, capabilities, and the system call filter."""
