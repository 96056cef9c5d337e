"""Nodepool: keeps pools of machines ready and hands them out."""
