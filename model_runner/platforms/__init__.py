"""What a device computes with."""
