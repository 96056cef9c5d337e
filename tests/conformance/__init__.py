"""What every driver has to do, whatever its cloud: see suite.py."""
