"""Rights of programs in slivers: privileges, their capabilities, and the system call filter."""
