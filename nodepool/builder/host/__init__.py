"""The builder's own machine: image files, mounts and processes of builds, and the journal that finds them after a crash."""
