"""The builder's machine: image files, mounts and processes of builds.

A journal finds their leftovers after a crash.
"""
