"""Instances of AWS: parameters, alternatives, machines."""
