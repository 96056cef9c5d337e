"""Networks of slivers: interfaces, firewall, bandwidth."""
