"""What others see of a builder at work: records of progress, gauges."""
