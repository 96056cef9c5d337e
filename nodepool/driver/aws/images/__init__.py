"""Images in AWS: imports and snapshots."""
