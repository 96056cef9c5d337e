"""What a sliver may use: disk, cores, bytes a day; `cgroups` for processor, memory and processes."""
