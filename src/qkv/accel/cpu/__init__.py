"""Fast paths for CPUs: prepacked decoding and encoding, oneDNN linears for training, and huge pages."""
