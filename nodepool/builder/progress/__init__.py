"""What a working builder publishes: progress records and gauges."""
