"""What programs in slivers may do: privileges with their capabilities, and the filter on system calls."""
