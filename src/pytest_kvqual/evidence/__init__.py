"""Raw evidence: append-only bundles with a manifest of digests, and their strict reader."""
