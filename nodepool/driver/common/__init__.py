"""Shared code of cloud drivers: options, offers, tags, and machines that are polled."""
