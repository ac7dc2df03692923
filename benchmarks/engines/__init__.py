"""What is measured: small scripts, each in a process of its own."""
